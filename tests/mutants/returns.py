"""Redis servers that come back: at other addresses, with other certificates, as they were before, or not at all."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PRIMARIES = "tests/tiers/redis/test_primaries.py"
RENEWED = "tests/tiers/redis/test_renewed_certificates.py"

MUTANTS = [
    Mutant(
        "certificates-are-read-once",
        "kvstore/tiers/redis/access.py",
        "(each.st_ino, each.st_mtime_ns, each.st_size)",
        "()",
        "a tier fails until a restart when its certificate was renewed",
        (f"{RENEWED}::test_renewed_certificates_are_used_from_the_next_connect_on",),
    ),
    Mutant(
        "a-cluster-at-other-addresses-is-lost",
        "kvstore/tiers/redis/cluster.py",
        "            nodes.startup_nodes = self._named | nodes.startup_nodes\n",
        "",
        "a cluster that came back at other addresses is found only by a restart",
        (
            "tests/tiers/redis/test_cluster_failures.py::"
            "test_a_cluster_is_found_again_whose_nodes_all_have_other_addresses",
        ),
    ),
    Mutant(
        "a-sentinel-may-take-for-ever",
        "kvstore/tiers/redis/topology.py",
        ' | {"socket_timeout": SENTINEL_S_MAX}\n',
        "\n",
        "one line that is never answered takes the tier away for ever",
        ("tests/tiers/redis/test_primaries.py::test_a_line_to_a_sentinel_that_is_never_answered_is_given_up",),
    ),
    Mutant(
        "a-redis-of-yesterday-counts",
        "kvstore/directory/directory.py",
        "        return is_known and not added\n",
        "        return not added\n",
        "what was told since a snapshot is missing, and what has left stays told",
        ("tests/directory/test_directory.py::test_a_redis_that_comes_back_as_it_was_before_says_so_at_the_next_beat",),
    ),
    Mutant(
        "what-a-full-redis-drops-stays-untold",
        "kvstore/server/announcing.py",
        "        self._period_s = KEEP_S_MIN if self._directory.lost_count else min(2 * self._period_s, KEEP_S)\n",
        "        self._period_s = KEEP_S\n",
        "routers find nothing of what nodes have for longer than a Redis keeps what nobody uses",
        ("tests/server/test_announcing.py::test_entries_that_a_full_redis_drops_are_told_again_soon",),
    ),
    Mutant(
        "a-line-stays-with-a-server-that-gives-nothing",
        "kvstore/tiers/redis/line.py",
        "        if isinstance(error, Unavailable) and MOVED not in error.fields:\n",
        "        if False:\n",
        "after a fail-over by name reads go to the old primary as long as it loads the new one's data",
        ("tests/tiers/redis/test_lines.py::test_a_line_to_a_server_that_gives_nothing_now_is_not_kept",),
    ),
    Mutant(
        "questions-stay-with-a-replica-without-its-primary",
        "kvstore/tiers/redis/replies.py",
        '_REPLICAS_REFUSALS = frozenset({"READONLY", "MASTERDOWN"})\n',
        '_REPLICAS_REFUSALS = frozenset({"READONLY"})\n',
        "after a fail-over by name lookups ask the old primary as long as it does not reach the new one",
        (f"{PRIMARIES}::test_reads_leave_a_server_that_gives_nothing_any_more",),
    ),
    Mutant(
        "movers-meet-a-replica-one-by-one",
        "kvstore/tiers/redis/line.py",
        "            if REPLICA not in error.fields and (not line.is_dead or line.has_heard):\n",
        "            if not line.is_dead or line.has_heard:\n",
        "after a fail-over by name each mover's line costs a chunk, and ten seconds in which none is written",
        (f"{PRIMARIES}::test_a_name_that_leads_to_another_primary_is_followed",),
    ),
]
