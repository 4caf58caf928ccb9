"""Counters since start, by name. Names are lower_snake and say their unit; the metrics page adds ``_total``."""

from __future__ import annotations

from collections import Counter

from kvstore.spec.model import CacheKind

DESCRIPTIONS: dict[str, str] = {
    "tickets_issued": "Prefixes held for fetches by ticket",
    "tickets_redeemed": "Fetches by ticket",
    "tickets_expired": "Tickets that ended unredeemed",
    "lookup_calls": "Lookups answered, or made in shared memory",
    "lookup_hit_chunks": "Chunks found by lookups",
    "lookup_hinted_chunks": "Of those not found, chunks that shared tiers are said to have",
    "lookup_miss_chunks": "Chunks asked for and not found by lookups",
    "fetch_calls": "Fetches answered, or seen in shared memory to bring nothing",
    "fetch_hit_chunks": "Chunks handed out by fetches",
    "fetch_miss_chunks": "Chunks asked for and not found by fetches",
    "fetch_bytes": "Bytes of chunks handed out by fetches",
    **{f"fetched_{kind.value}_chunks": f"Chunks of {kind.value} that fetches were given" for kind in CacheKind},
    "partial_prefills": "Prompts of which engines computed a part, with or without a plan",
    "partial_prefills_given_up": "Of these, those whose load took too long or was lost, so that it was computed",
    "partial_prefill_saved_milliseconds": "Time to first tokens below what plans say of plain prefills",
    "plans_compared": "Plans whose first token was measured, and compared with what was planned",
    "plans_within_15_percent": "Of these, plans that were off by no more than 15 % of the measured time",
    "plans_within_50_percent": "Of these, plans that were off by no more than half of the measured time",
    "plan_error_milliseconds": "Time by which such first tokens came earlier or later than planned",
    "plan_foretold_milliseconds": "Planned time of such first tokens",
    "plan_regret_milliseconds": "Time by which such first tokens came later than the fastest way was planned to",
    "plan_missed_milliseconds": "Time by which such first tokens came later than by plans that were only observed",
    "store_reservations": "Reservations made",
    "store_committed_chunks": "Chunks that became visible",
    "store_committed_bytes": "Bytes that became visible",
    "store_verified_bytes": "Bytes checksummed on their way into the arena",
    "store_refused_chunks": "Chunks refused for want of room or by a limit",
    "store_aborted_reservations": "Reservations aborted by their client or its death",
    "store_expired_reservations": "Reservations aborted for their age",
    "superseded_chunks": "Chunks that go first: a longer one begins with their tokens, or they are of a replaced value",
    "promoted_chunks": "Chunks brought from slower tiers into memory",
    "promoted_bytes": "Bytes brought from slower tiers into memory",
    "promotion_failed_chunks": "Chunks that could not be brought in",
    "fetch_joined_stores": "Fetches of stores that were still in flight",
    "read_back_chunks": "Chunks read back into memory for a slower tier that lacked them",
    "scrubbed_bytes": "Bytes that the scrub read again",
    "scrub_failures": "Copies that the scrub found damaged",
    "canary_passes": "Canaries that came back whole",
    "canary_failures": "Canaries that did not",
    "leases_revoked": "Leases taken back under pressure",
    "sessions_opened": "Sessions opened",
    "sessions_refused": "Connections refused at the hand-off",
    "quarantined_chunks": "Chunks set aside because their bytes failed a check",
    "operator_removed_chunks": "Chunks that left the node by an operator's word",
    "operator_removed_durable_chunks": "Chunks whose last copy that survives the process an operator had removed",
    "requests_failed": "Calls that ended in an error",
}

TIER_DESCRIPTIONS: dict[str, str] = {
    "written_chunks": "Chunks written",
    "written_bytes": "Bytes written",
    "refused_chunks": "Attempts to write a chunk that were refused",
    "demoted_chunks": "Chunks given up because a slower tier has them",
    "evicted_chunks": "Chunks evicted that no slower tier had",
    "evicted_bytes": "Bytes of such chunks",
    "verified_bytes": "Bytes checked on their way out",
    "fetched_chunks": "Chunks that fetches were given from there, told late where memory had them and no call was made",
    "recovered_chunks": "Chunks found at the start",
    "proven_chunks": "Chunks left by a crash that were read and synced anew before a store relied on them",
}
"""The counters of each local tier. Memory's names have no prefix, the others' have their tier's name."""
MEMORY_NAMES = ("demoted_chunks", "evicted_chunks", "evicted_bytes", "fetched_chunks")
"""Those that memory counts: stores and loads fill it, which have counters of their own."""
SHARED_NAMES = ("written_chunks", "written_bytes", "refused_chunks", "verified_bytes", "fetched_chunks")
"""Those that a shared tier counts: it does not tell what it gives up."""
SHARED_DESCRIPTIONS: dict[str, str] = {
    "asked_chunks": "Chunks that a shared tier was asked for",
    "late_answers": "Answers of a shared tier that came too late",
    "present_chunks": "Chunks not sent to a shared tier because it had them",
    "left_chunks": "Chunks not sent to a shared tier at once because another node was sending them",
    "touched_chunks": "Chunks used on this node of whose use a shared tier was told",
    "undemoted_chunks": "Chunks that left the node before a shared tier that is to have them took them",
}
"""The further counters of each shared tier."""
MEMORY = "dram"


class Counters:
    """Whole numbers by name, which only grow. ``descriptions``: the meaning of each."""

    def __init__(self) -> None:
        self.descriptions = dict(DESCRIPTIONS)
        self._values: Counter[str] = Counter(dict.fromkeys(self.descriptions, 0))
        self.add_tier(MEMORY, "memory")

    def add_tier(self, tier: str, said: str = "", *, is_shared: bool = False) -> None:
        """Add the counters of a tier. ``said``: its name in descriptions, if that is another. Idempotent."""
        names = MEMORY_NAMES if tier == MEMORY else SHARED_NAMES if is_shared else tuple(TIER_DESCRIPTIONS)
        of_tier = {name: TIER_DESCRIPTIONS[name] for name in names} | (SHARED_DESCRIPTIONS if is_shared else {})
        for name, description in of_tier.items():
            self.descriptions.setdefault(_name(tier, name), f"{description} ({said or tier})")
            self._values.setdefault(_name(tier, name), 0)

    def add(self, name: str, count: int = 1) -> None:
        assert name in self.descriptions, name
        self._values[name] += count

    def add_of(self, tier: str, name: str, count: int = 1) -> None:
        """Add to a counter of one tier."""
        self.add(_name(tier, name), count)

    def snapshot(self) -> dict[str, int]:
        return dict(self._values)


def _name(tier: str, name: str) -> str:
    return name if tier == MEMORY else f"{tier}_{name}"
