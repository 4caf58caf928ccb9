"""gpu-ttft-prefix: ttft-prefix on a GPU, with the 8B geometry and random weights, at 4,096 and 32,768 tokens."""

from __future__ import annotations

from kvstore_ops.bench import card
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.gpu_fetch import CAPACITY, CONTEXTS
from kvstore_ops.bench.model_8b import build
from kvstore_ops.bench.result import Result
from kvstore_ops.bench.ttft_prefix import SUFFIX, measured


def run(scale: str) -> Result:
    """Measure each length of context. The figure is that of the least ratio."""
    name, cases = "gpu-ttft-prefix", {}
    model = build(scale, card.device_of(scale))
    with shared.ready(scale, CAPACITY) as (_, client):
        for context in CONTEXTS[scale]:
            cases[f"{context} + {SUFFIX} tokens"] = measured(name, scale, model, client, context)
    return card.joined(name, cases, card.least(cases))
