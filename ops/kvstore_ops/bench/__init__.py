"""Benchmarks: one per file, each prints its figure beside the limit measured in the same run."""

SHARED = frozenset(
    {
        "result",
        "copying",
        "card",
        "gpu_recomputed",
        "model_1b",
        "model_8b",
        "plan_cost",
        "paged",
        "recomputed",
        "memory",
        "redis_pipeline",
        "s3_responder",
        "origin",
        "alone",
        "beside",
        "peer",
        "lmcache_peer",
        "lmcache_redis_peer",
        "lmcache_s3_peer",
        "mooncake_peer",
        "throttled",
        "rates",
        "vllm_engine",
        "vllm_imports",
    }
)
"""Modules of this package that are not benchmarks."""
BESIDE = frozenset({"peers", "peers-redis", "peers-s3", "vllm-cold", "vllm-documents"})
"""Benchmarks that need another product's environment: "all" leaves them out, only their names run them."""
GPU = ("gpu-kernels", "gpu-fetch", "gpu-store", "gpu-hbm", "gpu-ttft-prefix", "gpu-ttft-blend", "gpu-ttft-sibling")
"""Benchmarks of a GPU, in the order of ``make gpu``. Where there is none, "all" leaves them out, except at the scale
tiny, which proves on a CPU that they run."""
MODULES = {"gpu-kernels": "kernels_gpu"}
"""Modules of benchmarks that have another name."""
