"""Benchmarks: one per file, each prints its figure beside the limit measured in the same run."""

SHARED = frozenset(
    {
        "result",
        "copying",
        "model_1b",
        "plan_cost",
        "paged",
        "recomputed",
        "memory",
        "s3_responder",
        "origin",
        "alone",
        "lmcache",
        "lmcache_peer",
        "throttled",
    }
)
"""Modules of this package that are not benchmarks."""
BESIDE = frozenset({"peers"})
"""Benchmarks that need another product's environment: "all" leaves them out, only their names run them."""
