"""ttft-prefix: the time of a full prefill over that with a cached prefix, for 4,096 tokens and a suffix of 64."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from kvstore_ops.bench import card
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.model_1b import build, prompts
from kvstore_ops.bench.result import Result, note, quartiles, show

CONTEXT = {"full": 4096, "quick": 4096, "tiny": 512}
SUFFIX = 64
RUNS = {"full": 5, "quick": 3, "tiny": 1}
TARGET = 10.0


def run(scale: str) -> Result:
    """Measure interleaved pairs. Full prefill is one pass without a sidecar, because that is its fastest form."""
    model = build(scale)
    with shared.ready("full" if scale != "tiny" else "tiny") as (_, client):
        return measured("ttft-prefix", scale, model, client, CONTEXT[scale])


def measured(name: str, scale: str, model: Any, client: Any, context: int) -> Result:
    """Measure pairs of a full prefill and one with a cached prefix, on the model's device. ``context``: the tokens of
    the prefix."""
    import torch
    from kvstore_client.engines.transformers import CachedModel

    device = model.device.type
    prompt = prompts(model, 2, context + SUFFIX)[1].to(device)  # the first of each length would begin alike
    cached = CachedModel(model, client)
    note(f"{name}: the prompt, cold")
    cold = cached.generate(prompt, max_new_tokens=1, do_sample=False)
    assert cold.report.wait_stored(60.0).name == "MEMORY"
    cached.generate(prompt, max_new_tokens=1, do_sample=False)

    def whole() -> None:
        with torch.inference_mode():
            model(prompt, logits_to_keep=1)

    whole_s = _timer(device, whole)
    if device != "cpu":
        whole_s()  # the first pass of this shape also chooses and loads kernels
    full, warm, fetched = [], [], 0
    for number in range(1, RUNS[scale] + 1):
        full.append(whole_s())
        note(f"{name}: run {number} of {RUNS[scale]}, full prefill {full[-1]:.3f} s")
        output = cached.generate(prompt, max_new_tokens=1, do_sample=False)
        assert bool((output.sequences == cold.sequences).all()), "other tokens than cold"
        warm.append(output.report.ttft_s)
        fetched = output.report.fetched_bytes
    cached.close()
    ratios = [slow / fast for slow, fast in zip(full, warm, strict=True)]
    ratio = statistics.median(ratios)
    show(
        f"{name}: {context} + {SUFFIX} tokens, {model.config.num_hidden_layers} layers",
        [
            ("cached", f"{statistics.median(warm):.3f} s, {fetched / 1e6:.0f} MB fetched, {ratio:.1f}x faster"),
            ("full prefill, one pass", f"{statistics.median(full):.3f} s"),
            ("cold through the adapter, stepped", f"{cold.report.ttft_s:.3f} s"),
        ],
    )
    return Result(
        name=name, value=statistics.median(warm), unit="s", limit=statistics.median(full), ratio=ratio,
        target=f">= {TARGET:.0f}", met=ratio >= TARGET, runs=len(full), spread=quartiles(ratios),
        conditions={
            "scale": scale, "layers": model.config.num_hidden_layers, "dtype": "bfloat16", "device": device,
            "context": context, "cold_s": cold.report.ttft_s, "fetched_bytes": fetched,
        },
    )  # fmt: skip


def _timer(device: str, action: Callable[[], object]) -> Callable[[], float]:
    return lambda: card.timed(device, action)
