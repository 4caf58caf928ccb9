"""zero-hit: the delay of a request that hits nothing: the time of our own code before the first token, over the
prefill. Beside it is the paired end-to-end difference to the same stepped prefill without a sidecar."""

from __future__ import annotations

import statistics
from typing import Any

from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.model_1b import build, prompts
from kvstore_ops.bench.result import Result, note, quartiles, show

TOKENS = {"full": 2048, "quick": 2048, "tiny": 512}
RUNS = {"full": 6, "quick": 3, "tiny": 1}
RATIO_TARGET, SECONDS_TARGET = 0.003, 0.0015


def plain_seconds(model: Any, prompt: Any, step: int) -> float:
    """Return the seconds to the first token by the same steps with transformers' own cache."""
    import torch
    from transformers import DynamicCache

    def prefill() -> None:
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            last = (prompt.shape[1] - 1) // step * step
            for start in range(0, last, step):
                model.base_model(input_ids=prompt[:, start : start + step], past_key_values=cache, use_cache=True)
            model.generate(prompt, past_key_values=cache, max_new_tokens=1, do_sample=False)

    return shared.timed(prefill)


def run(scale: str) -> Result:
    """Measure prompts that are new to the sidecar. The background store of each runs into the next measurement."""
    from kvstore_client.engines.transformers import CachedModel

    model = build(scale)
    step = 256
    asked = prompts(model, RUNS[scale] + 1, TOKENS[scale])
    with shared.ready("full" if scale != "tiny" else "tiny") as (_, client):
        cached = CachedModel(model, client)
        cached.generate(asked[-1], max_new_tokens=1, do_sample=False)
        own, prefill, differences = [], [], []
        for number, prompt in enumerate(asked[:-1], start=1):
            plain = plain_seconds(model, prompt, step)
            note(f"zero-hit: prompt {number} of {RUNS[scale]}, prefill without a sidecar {plain:.1f} s")
            report = cached.generate(prompt, max_new_tokens=1, do_sample=False).report
            assert not report.reused_token_count
            own.append(report.lookup_s)
            prefill.append(plain)
            differences.append(report.ttft_s - plain)
        cached.close()
    ratios = [mine / whole for mine, whole in zip(own, prefill, strict=True)]
    ratio, seconds = statistics.median(ratios), statistics.median(own)
    low, high = quartiles(differences)
    middle = statistics.median(differences)
    show(
        f"zero-hit: {TOKENS[scale]} tokens, {len(own)} prompts",
        [
            ("our code before the first token", f"{seconds * 1e3:.2f} ms, {ratio:.5f} of the prefill"),
            ("prefill", f"{statistics.median(prefill):.2f} s"),
            ("end to end, paired difference", f"{middle * 1e3:+.1f} ms [{low * 1e3:+.1f}, {high * 1e3:+.1f}]"),
        ],
    )  # fmt: skip
    return Result(
        name="zero-hit", value=seconds, unit="s", limit=statistics.median(prefill), ratio=ratio,
        target="<= 0.003 of the prefill, or <= 1.5 ms", met=ratio <= RATIO_TARGET or seconds <= SECONDS_TARGET,
        runs=len(own), spread=quartiles(ratios),
        conditions={"scale": scale, "layers": model.config.num_hidden_layers, "difference_s": middle},
    )  # fmt: skip
