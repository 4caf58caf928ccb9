"""Benchmarks: one per file, each prints its figure beside the limit measured in the same run."""

SHARED = frozenset(
    {
        "result",
        "copying",
        "model_1b",
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
"""Modules of this package that are no benchmark."""
BESIDE = frozenset({"peers"})
"""Benchmarks that need somebody else's environment: run by their names, not by "all"."""
