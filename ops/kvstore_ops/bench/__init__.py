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
        "vllm_engine",
        "vllm_imports",
    }
)
"""Modules of this package that are not benchmarks."""
BESIDE = frozenset({"peers", "vllm-cold"})
"""Benchmarks that need another product's environment: "all" leaves them out, only their names run them."""
