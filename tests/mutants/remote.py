"""The remote plane: what is sent, what is believed of it, and who is waited for."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CLIENT = "clients/kvstore_client/planes/stream/prefix.py"
STRIPS = "clients/kvstore_client/planes/stream/strips.py"
DATA = "kvstore/wire/data.py"
DOOR = "kvstore/remote/door.py"
CERTIFICATES = "kvstore/remote/certificates.py"
T_RENEWAL = "tests/e2e/remote/test_renewal.py"
RECEIVING = "kvstore/remote/receiving.py"
SENDING = "kvstore/remote/sending.py"
SESSION = "kvstore/remote/session.py"
T_REMOTE = "tests/e2e/remote/test_bad_peers.py"
T_RECEIVING = "tests/server/test_remote_receiving.py"
T_STRANGERS = "tests/e2e/remote/test_strangers.py"
T_JOINS = "tests/e2e/test_joins.py"

MUTANTS = [
    Mutant(
        "a-renewed-certificate-is-not-used",
        CERTIFICATES,
        "        self._fresh = self._configuration()\n",
        "",
        "a certificate that was renewed in time expires all the same",
        (f"{T_RENEWAL}::test_renewed_certificates_are_in_use_with_the_next_handshake",),
    ),
    Mutant(
        "a-certificate-without-its-key-is-used",
        CERTIFICATES,
        "        self.check()\n        self._fresh",
        "        self._fresh",
        "nobody gets in between the replacement of a certificate and that of its key",
        (f"{T_RENEWAL}::test_renewed_certificates_are_in_use_with_the_next_handshake",),
    ),
    Mutant(
        "a-token-that-was-removed-is-known",
        "kvstore/remote/tokens.py",
        "        of = {**self._of, file.tenant: tokens}\n",
        "        of = {**self._of, file.tenant: [*self._of.get(file.tenant, ()), *tokens]}\n",
        "a token that leaked opens the door until the next restart",
        (f"{T_RENEWAL}::test_tokens_come_and_go_with_their_file",),
    ),
    Mutant(
        "the-last-token-stays",
        "kvstore/remote/tokens.py",
        "            if not was_empty:\n",
        "            if True:\n",
        "the only token of a tenant, which leaked, opens the door until the next restart",
        ("tests/security/test_process.py::test_the_last_token_of_a_tenant_can_be_taken_back",),
    ),
    Mutant(
        "a-session-outlives-its-token",
        "kvstore/remote/boundary.py",
        "                call.cancel()\n",
        "                pass\n",
        "who has a token that leaked hears of the tenant's chunks after it was taken back",
        (f"{T_RENEWAL}::test_a_token_that_is_gone_ends_the_sessions_that_it_opened",),
    ),
    Mutant(
        "more-connections-than-files",
        "kvstore/server/descriptors.py",
        "    check_listener(tenants, limit)\n",
        "",
        "who reaches the port takes the files that clients' stores need, without a token",
        (
            "tests/server/test_descriptors.py::"
            "test_the_connections_of_other_hosts_fit_the_limit_of_the_process_that_has_them",
        ),
    ),
    Mutant(
        "received-and-unchecked",
        STRIPS,
        '        return b"".join(found) == self.chunk.checksums[start * CHECKSUM_BYTES : stop * CHECKSUM_BYTES]\n',
        "        return True\n",
        "bytes that changed on their way are handed out",
        (f"{T_REMOTE}::test_a_confused_server_is_a_miss",),
    ),
    Mutant(
        "received-with-strips-left-out",
        CLIENT,
        "        if extent.first != first or extent.stop > stop:\n",
        "        if extent.stop > stop:\n",
        "a chunk counts as whole of which a message was lost",
        (f"{T_REMOTE}::test_a_confused_server_is_a_miss",),
    ),
    Mutant(
        "received-with-a-chunk-left-out",
        CLIENT,
        "            self._check_leading()\n",
        "",
        "a chunk that the server did not name is handed out as whatever lay in memory",
        (f"{T_REMOTE}::test_a_confused_server_is_a_miss",),
    ),
    Mutant(
        "received-in-part-and-whole",
        CLIENT,
        "                self._prefix.cut(chunk, lost)\n",
        "                pass\n",
        "what never came is handed out as whatever lay in memory",
        (f"{T_REMOTE}::test_a_confused_server_is_a_miss",),
    ),
    Mutant(
        "message-without-an-end",
        DATA,
        "    if place + size != len(message):\n",
        "    if place + size > len(message):\n",
        "what follows a message's bytes is dropped, and nobody says so",
        (f"{T_REMOTE}::test_bad_store_streams_are_refused",),
    ),
    Mutant(
        "stored-and-unchecked",
        RECEIVING,
        "        if xxhash.xxh3_128_digest(data.data) != fields.checksum:\n",
        "        if False:\n",
        "bytes that changed on their way are stored under a checksum of their own",
        (f"{T_REMOTE}::test_bad_store_streams_are_refused",),
    ),
    Mutant(
        "runs-that-are-not-the-message",
        RECEIVING,
        "    if total != byte_count or not total:\n",
        "    if not total:\n",
        "strips are filled from what another client left in the segment",
        (f"{T_REMOTE}::test_bad_store_streams_are_refused",),
    ),
    Mutant(
        "sent-after-it-went",
        SENDING,
        "        return bool(self._node.generations[chunk.entry.generation_slot] == chunk.entry.generation)\n",
        "        return True\n",
        "the bytes of the next chunk are sent for one whose lease was revoked",
        (f"{T_REMOTE}::test_a_revoked_lease_ends_the_stream_with_stale",),
    ),
    Mutant(
        "sent-before-it-is-committed",
        SENDING,
        "            if news.is_provisional:\n",
        "            if False:\n",
        "strips go out whose checksums nobody knows",
        (f"{T_JOINS}::test_by_the_remote_plane_layers_come_with_the_commit",),
    ),
    Mutant(
        "reader-waited-for-without-end",
        DOOR,
        "            await asyncio.wait((leaving,), timeout=self._stall_s)\n",
        "            await asyncio.wait((leaving,), timeout=None)\n",
        "a client that reads nothing keeps its lease for ever",
        (f"{T_REMOTE}::test_a_slow_reader_loses_its_lease_and_holds_nobody_up",),
    ),
    Mutant(
        "writer-waited-for-without-end",
        RECEIVING,
        "            async with asyncio.timeout(self._stall_s):\n",
        "            async with asyncio.timeout(None):\n",
        "a client that sends nothing keeps its staging for ever",
        (f"{T_STRANGERS}::test_a_writer_that_stalls_is_let_go",),
    ),
    Mutant(
        "staging-back-before-the-abort-was-answered",
        RECEIVING,
        "        if code in _NOT_READING:\n",
        "        if True:\n",
        "the next store's bytes are written where the sidecar still reads those of one that failed",
        (f"{T_RECEIVING}::test_a_fill_that_the_sidecar_did_not_answer_gives_its_staging_back",),
    ),
    Mutant(
        "answer-for-somebody-else",
        SESSION,
        "                while self._owed:\n                    await self._take_owed()\n",
        "",
        "a client is given another one's staging",
        ("tests/server/test_remote_session.py::test_a_question_that_was_cancelled_leaves_no_answer_for_the_next",),
    ),
    Mutant(
        "idle-staging-is-waited-for-as-for-an-answer",
        SESSION,
        "                    await self._close_segment(segment, None)\n",
        "                    await self._close_segment(segment, EXCHANGE_TIMEOUT_S)\n",
        "a sidecar that stands still for some seconds ends the sessions of clients that did nothing",
        (
            "tests/server/test_remote_session.py::"
            "test_idle_staging_is_looked_for_and_a_sidecar_that_stands_still_ends_no_session",
        ),
    ),
]
