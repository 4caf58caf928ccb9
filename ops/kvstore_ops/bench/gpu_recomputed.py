"""Shared by the benchmarks of partial prefills on a GPU: two lengths of context, and the memory of the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore_ops.bench import card
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.gpu_fetch import CAPACITY, CONTEXTS
from kvstore_ops.bench.memory import Held, allocated_bytes_max, allowed, merged_bytes
from kvstore_ops.bench.model_8b import build
from kvstore_ops.bench.recomputed import SHARE_OF_IDEAL, SUFFIX, Asked, measured
from kvstore_ops.bench.result import Result

GPU_CONTEXTS = CONTEXTS


def measured_on_gpu(
    name: str, scale: str, asked: Callable[..., Asked], keep: Callable[[str, Asked, Any], None]
) -> Result:  # fmt: skip
    """Measure a benchmark's partial prefills on the 8B geometry, for each length of context."""
    device, cases = card.device_of(scale), {}
    model = build(scale, device)
    with shared.ready(scale, CAPACITY) as (_, client):
        for context in GPU_CONTEXTS[scale]:
            found = asked(scale, model, client, context)
            keep(name, found, client)
            held = partial(held_here, device, model, found)
            cases[f"{context} + {SUFFIX} tokens"] = measured(name, scale, model, found, held)
    return card.joined(name, cases, card.least(cases, _share_of_target))


def _share_of_target(found: Result) -> float:
    figures = found.conditions["settings"][found.conditions["judged"]]
    return float(found.ratio / (SHARE_OF_IDEAL / figures["f"]))


def held_here(device: str, model: Any, found: Asked) -> tuple[dict[str, Held], int]:
    """Measure the peak of the device's memory, in this process: of each setting, and of a full prefill. The merged
    cache, which lies on the GPU, counts once."""
    import torch

    settings = {}
    for each, setting in found.settings.items():
        merged = merged_bytes(found.spec, found.prompt.shape[1])
        bound = allowed(model, found.spec, found.prompt.shape[1], found.context, setting)
        most = _peak_bytes(device, partial(found.ask, setting))
        settings[each] = Held(merged, most - merged if device == "cuda" else most, bound, 0)
    prompt = found.prompt.to(device)

    def whole() -> object:
        with torch.inference_mode():
            return model(prompt, logits_to_keep=1)

    return settings, _peak_bytes(device, whole)


def _peak_bytes(device: str, action: Callable[[], object]) -> int:
    import torch

    if device != "cuda":
        return allocated_bytes_max(action)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)
