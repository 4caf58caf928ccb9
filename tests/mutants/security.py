"""Who may do what: sessions, users, tokens, TLS, tenants, files."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SESSIONS = "kvstore/controller/sessions/registry.py"
LEASES = "kvstore/controller/sessions/leases.py"
HANDOFF = "kvstore/server/handoff.py"
STATE = "kvstore/server/state.py"
SECRETS = "kvstore/server/secrets.py"
TOKENS = "kvstore/remote/tokens.py"
BOUNDARY = "kvstore/remote/boundary.py"
T_OPERATORS = "tests/e2e/test_operators.py"
T_WEB = "tests/server/test_web.py"
LISTENER = "kvstore/server/web/listener.py"
CERTIFICATES = "kvstore/remote/certificates.py"
TENANT_SETTINGS = "kvstore/config/tenants.py"
DIRECTORY = "kvstore/tiers/nvme/directory.py"
DESCRIPTORS = "kvstore/server/descriptors.py"
OUTBOX = "kvstore/server/outbox.py"
T_DESCRIPTORS = "tests/server/test_descriptors.py"
APP = "kvstore/server/app.py"
T_PROCESS = "tests/security/test_process.py"
T_SESSIONS = "tests/security/test_sessions.py"
T_TENANTS = "tests/security/test_tenant_users.py"
T_REMOTE = "tests/e2e/remote/test_admission.py"
T_BAD_PEERS = "tests/e2e/remote/test_bad_peers.py"
T_TLS = "tests/e2e/remote/test_tls.py"
T_SECRETS = "tests/server/test_secrets.py"
T_SERVER = "tests/server/test_server.py"
T_LIFE = "tests/server/test_life.py"

MUTANTS = [
    Mutant(
        "digests-for-everybody",
        "kvstore/server/web/facts.py",
        'entry.digest.hex()[:DIGEST_DIGITS] if self._shows_digests else "",',
        "entry.digest.hex()[:DIGEST_DIGITS],",
        "any user of the machine learns whether a prompt that he guesses was fetched",
        (f"{T_WEB}::test_what_it_shows_is_what_the_service_has",),
    ),
    Mutant(
        "traces-with-models-names",
        "kvstore/telemetry/spans.py",
        "            reason = error.status if isinstance(error, KVStoreError) else type(error).__name__\n",
        "            reason = str(error)\n",
        "what a message names leaves the machine with a span",
        ("tests/telemetry/test_tracing.py::test_a_failed_call_says_what_failed",),
    ),
    Mutant(
        "a-page-for-everybody",
        LISTENER,
        "        if route.is_page and not self.tokens and self.page_reason:\n",
        "        if False:\n",
        "whoever reaches the port reads all tenants' models",
        (f"{T_WEB}::test_the_page_needs_a_token_where_others_could_read_it",),
    ),
    Mutant(
        "a-token-that-is-cut",
        "kvstore/server/web/site.py",
        "    if len(data) > FILE_BYTES_MAX:",
        "    if False:",
        "the first characters of a token open the page",
        (f"{T_WEB}::test_a_token_file_that_is_too_long_stops_the_start",),
    ),
    Mutant(
        "any-password-will-do",
        LISTENER,
        '        if self.tokens and not self._is_known(request.headers.get("authorization", "")):\n',
        "        if False:\n",
        "a token file guards nothing",
        (f"{T_WEB}::test_the_page_needs_a_token_where_others_could_read_it",),
    ),
    Mutant(
        "another-sites-name-for-loopback",
        LISTENER,
        '        if self.is_local and not _is_own_name(request.headers.get("host", "")):\n',
        "        if False:\n",
        "a site whose name becomes 127.0.0.1 reads the page of whoever visits it",
        (f"{T_WEB}::test_other_sites_names_for_this_address_are_refused",),
    ),
    Mutant(
        "browsers-without-a-bound",
        LISTENER,
        "        if self._open_count <= CONNECTION_COUNT_MAX:\n",
        "        if True:\n",
        "browsers take the files that engines need",
        (f"{T_WEB}::test_connections_that_ask_nothing_keep_nobody_from_an_answer",),
    ),
    Mutant(
        "every-token-administers",
        "kvstore/remote/door.py",
        "        if service == ADMIN and name != ADMITTED:\n",
        "        if False:\n",
        "an engine's token shows and changes what only operators may",
        (f"{T_OPERATORS}::test_every_method_of_the_admin_service_asks_for_the_right",),
    ),
    Mutant(
        "the-right-of-another-token",
        TOKENS,
        "                    found, is_admin = tenant, token.is_admin\n",
        "                    found, is_admin = tenant, any(known.is_admin for known in tokens)\n",
        "one operator's token gives every engine the right",
        (f"{T_OPERATORS}::test_every_method_of_the_admin_service_asks_for_the_right",),
    ),
    Mutant(
        "names-move-the-cursor",
        "ops/kvstore_ops/operators/harmless.py",
        '_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}\n',
        "_UNSEEN: set[str] = set()\n",
        "a model's name writes over the operator's screen",
        (f"{T_OPERATORS}::test_names_that_others_chose_are_harmless_in_every_table",),
    ),
    Mutant(
        "all-questions-at-once",
        "kvstore/controller/operators/turns.py",
        "            await turns.clock.sleep(rest_s)\n",
        "            pass\n",
        "many listings hold up every fetch",
        ("tests/controller/test_operators.py::test_one_step_a_round_however_many_ask",),
    ),
    Mutant(
        "session-of-any-secret",
        SESSIONS,
        "        session = self._by_secret.get(secret)\n",
        "        session = self._by_secret.get(secret) or next(iter(self._by_secret.values()), None)\n",
        "a guessed secret acts as somebody's session",
        (f"{T_SESSIONS}::test_every_call_needs_a_live_secret",),
    ),
    Mutant(
        "secret-outlives-its-session",
        SESSIONS,
        "        self._by_secret.pop(session.secret, None)\n",
        "        pass\n",
        "what was stolen from a process that ended still opens doors",
        (f"{T_SESSIONS}::test_a_secret_stolen_from_a_session_that_ended_is_worthless",),
    ),
    Mutant(
        "secret-of-few-bytes",
        SESSIONS,
        "SECRET_BYTES = 32\n",
        "SECRET_BYTES = 4\n",
        "a session's secret can be guessed",
        ("tests/server/test_handoff.py::test_the_welcome_hands_out_every_region",),
    ),
    Mutant(
        "lease-of-another-session",
        LEASES,
        "        held = self._held.get(session)\n        if held is None:\n",
        "        held = next((each for each in self._held.values() if {*lease_ids} & {*each.leases}), None)\n"
        "        if held is None:\n",
        "a client lets another's chunks go while they are copied",
        (f"{T_SESSIONS}::test_another_sessions_lease_cannot_be_released",),
    ),
    Mutant(
        "any-user-at-the-hand-off",
        HANDOFF,
        "        if peer_uid(connection) not in self._uids:\n",
        "        if False:\n",
        "another user of the machine reads everybody's caches",
        (f"{T_SESSIONS}::test_another_user_is_denied_even_where_the_directory_lets_it_through",),
    ),
    Mutant(
        "silent-connections-stay",
        HANDOFF,
        "            async with asyncio.timeout(HELLO_TIMEOUT_S):\n",
        "            async with asyncio.timeout(None):\n",
        "connections that say nothing take all descriptors",
        ("tests/server/test_handoff.py::test_a_connection_without_hello_is_let_go",),
    ),
    Mutant(
        "another-version-at-the-hand-off",
        "kvstore/handoff/messages.py",
        "    return type(value) is int and value == PROTOCOL_VERSION  # true == 1 == 1.0\n",
        "    return type(value) is int\n",
        "two releases misunderstand each other's packets",
        ("tests/server/test_handoff.py::test_another_version_is_refused_in_words",),
    ),
    Mutant(
        "sockets-open-to-others",
        STATE,
        "        os.chmod(path, 0o600)\n",
        "        os.chmod(path, 0o666)\n",
        "where the directory lets others through they may connect",
        (f"{T_SERVER}::test_sockets_and_directories_are_ours_alone",),
    ),
    Mutant(
        "directory-open-to-others",
        STATE,
        "    if status.st_mode & 0o777 & ~allowed:\n",
        "    if False:\n",
        "another user puts a socket of his in the server's place",
        (f"{T_LIFE}::test_a_directory_open_to_others_is_refused",),
    ),
    Mutant(
        "two-servers-on-one-state",
        STATE,
        "    if not disk.lock(descriptor, LOCK_WAIT_S):\n",
        "    if False:\n",
        "two servers write to the same places",
        (f"{T_LIFE}::test_a_second_server_on_the_same_state_is_refused",),
    ),
    Mutant(
        "socket-of-a-live-server-removed",
        STATE,
        '            raise Unavailable(f"another server listens on {path}: stop it, or set server.socket_directory")\n',
        "            break\n",
        "a running server is cut off from its clients",
        (f"{T_SERVER}::test_another_servers_sockets_are_not_taken",),
    ),
    Mutant(
        "secret-file-open-to-others",
        SECRETS,
        "        if status.st_mode & 0o077:\n",
        "        if False:\n",
        "a tenant's secret is everybody's",
        (f"{T_SECRETS}::test_a_file_that_others_may_read_or_write_is_refused",),
    ),
    Mutant(
        "secret-of-few-characters",
        SECRETS,
        "    if not SECRET_BYTES_MIN <= len(text) <= SECRET_BYTES_MAX:\n",
        "    if not len(text) <= SECRET_BYTES_MAX:\n",
        "an empty file is a tenant's secret",
        (f"{T_SECRETS}::test_what_is_no_secret_is_refused_with_the_remedy",),
    ),
    Mutant(
        "secret-of-two-tenants",
        SECRETS,
        "        if other != name:\n",
        "        if False:\n",
        "two tenants find each other's chunks on the device",
        (f"{T_SECRETS}::test_two_tenants_never_have_one_secret",),
    ),
    Mutant(
        "any-token",
        TOKENS,
        "            if hmac.compare_digest(token.digest, given):\n",
        "            if True:\n",
        "whoever reaches the port is let in",
        (f"{T_REMOTE}::test_a_wrong_token_is_refused_and_said",),
    ),
    Mutant(
        "token-of-two-tenants",
        TOKENS,
        "        if owner := _owner(of, file.tenant):\n",
        "        if False:\n",
        "a token of one tenant opens another's door",
        (f"{T_TENANTS}::test_a_start_that_would_mix_tenants_is_refused",),
    ),
    Mutant(
        "token-that-a-second-tenant-adds",
        TOKENS,
        "            if not shared:\n",
        "            if True:\n",
        "a tenant writes another's token into its file, and the other's engines use its chunks",
        (f"{T_PROCESS}::test_tenants_may_swap_their_tokens",),
    ),
    Mutant(
        "calls-without-a-token",
        BOUNDARY,
        "            return _refusal(error)\n        call = asyncio",
        "            return await continuation(details)\n        call = asyncio",
        "who has no token may call what looks at none",
        (
            f"{T_REMOTE}::test_a_wrong_token_is_refused_and_said",
            f"{T_BAD_PEERS}::test_garbage_and_unknown_calls_are_refused",
        ),
    ),
    Mutant(
        "clients-without-a-certificate",
        CERTIFICATES,
        "require_client_authentication=bool(client_ca_file)",
        "require_client_authentication=False",
        "mutual TLS asks nobody for a certificate",
        (f"{T_TLS}::test_mutual_tls",),
    ),
    Mutant(
        "listening-in-the-open",
        "kvstore/config/remote.py",
        '            check_setting(is_local or bool(certificate and key), "remote.address", self.address, remedy)\n',
        "",
        "tokens and caches cross the network for everybody to read",
        (f"{T_REMOTE}::test_a_start_that_would_be_unsafe_is_refused",),
    ),
    Mutant(
        "token-in-the-open",
        "clients/kvstore_client/planes/place.py",
        "    if not tls and not is_loopback(host):\n",
        "    if False:\n",
        "a client sends its token over a network that anybody may read",
        (f"{T_REMOTE}::test_a_token_does_not_travel_in_the_open",),
    ),
    Mutant(
        "user-of-two-tenants",
        TENANT_SETTINGS,
        "        if tenant.uid in uids:\n",
        "        if False:\n",
        "one user's processes choose whose caches they read",
        ("tests/config/test_tenants.py::test_a_mistake_is_named_with_its_remedy",),
    ),
    Mutant(
        "device-directory-of-another-tenant",
        DIRECTORY,
        '        if found and found.get("owner", "") != self._owner:\n',
        "        if False:\n",
        "a tenant is given another's device, and writes over it",
        ("tests/tiers/nvme/test_strangers.py::test_another_tenants_directory_is_refused_and_untouched",),
    ),
    Mutant(
        "events-of-another-tenant",
        "kvstore/controller/controller.py",
        '        if tenant not in ("", self.tenant):\n',
        "        if False:\n",
        "a watcher believes that it watches a tenant whose events it does not see",
        ("tests/e2e/test_watch.py::test_another_tenant_is_refused_and_ones_own_is_not",),
    ),
    Mutant(
        "answers-that-nobody-reads",
        OUTBOX,
        "        if sent.reply_count >= REPLIES_AHEAD:\n",
        "        if False:\n",
        "one client's unread answers take memory, and the descriptors that all clients need",
        ("tests/server/test_handoff.py::test_a_client_is_sent_a_few_answers_ahead_of_what_it_reads",),
    ),
    Mutant(
        "soft-limit-as-it-was",
        DESCRIPTORS,
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))\n",
        "    pass\n",
        "the server runs out of open files while it may have more",
        (f"{T_DESCRIPTORS}::test_the_soft_limit_is_raised_and_more_regions_than_it_had_are_served",),
    ),
    Mutant(
        "settings-that-need-too-many-files",
        DESCRIPTORS,
        "    if total <= limit:\n",
        "    if True:\n",
        "a server starts that will run out of open files",
        (f"{T_DESCRIPTORS}::test_what_all_tenants_need_is_counted",),
    ),
    Mutant(
        "numbers-of-any-size",
        "kvstore/handoff/messages.py",
        "    return type(value) is int and 0 <= value <= most\n",
        "    return type(value) is int and 0 <= value\n",
        "a number in a packet overflows what it is added to",
        ("tests/handoff/test_packets.py::test_a_number_beyond_its_limit_is_refused_by_name",),
    ),
    Mutant(
        "descriptors-that-nobody-reads",
        OUTBOX,
        "        if sum(each.descriptor_count for each in self._sent.values()) + wanted <= self._most:\n",
        "        if True:\n",
        "a few clients' unread answers take the descriptors that the kernel lets a user have on their way",
        (f"{T_DESCRIPTORS}::test_answers_that_nobody_reads_cost_nobody_else_a_session_or_memory",),
    ),
    Mutant(
        "token-compared-by-its-bytes",
        TOKENS,
        "            if hmac.compare_digest(token.digest, given):\n",
        "            if token.digest == given:\n",
        "the time that a refusal takes says how much of a token was right",
        (f"{T_PROCESS}::test_every_token_is_compared_in_constant_time_whatever_was_found",),
    ),
    Mutant(
        "processes-that-others-may-read",
        APP,
        "    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)\n",
        "    pass\n",
        "any process of the same user reads every tenant's secret and cache",
        (f"{T_PROCESS}::test_memory_and_secrets_of_its_processes_are_closed_to_others_of_the_same_user",),
    ),
    Mutant(
        "remote-plane-that-others-may-read",
        "kvstore/remote/__main__.py",
        "PR_SET_DUMPABLE, 0, 0, 0, 0)",
        "PR_SET_DUMPABLE, 1, 0, 0, 0)",
        "any process of the same user reads tokens and caches",
        (f"{T_PROCESS}::test_memory_and_secrets_of_its_processes_are_closed_to_others_of_the_same_user",),
    ),
    Mutant(
        "files-that-others-may-read",
        APP,
        "    os.umask(0o077)\n",
        "",
        "what is stored is read by everybody on the machine",
        (f"{T_PROCESS}::test_its_files_are_its_own_whatever_the_umask_was",),
    ),
]
