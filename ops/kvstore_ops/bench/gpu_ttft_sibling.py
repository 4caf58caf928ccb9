"""gpu-ttft-sibling: ttft-sibling on a GPU, with the 8B geometry and random weights, at 4,096 and 32,768 tokens."""

from __future__ import annotations

from kvstore_ops.bench.gpu_recomputed import measured_on_gpu
from kvstore_ops.bench.result import Result
from kvstore_ops.bench.ttft_sibling import asked, keep


def run(scale: str) -> Result:
    """Measure each length of context. The figure is that of the least share of its own target."""
    return measured_on_gpu("gpu-ttft-sibling", scale, asked, keep)
