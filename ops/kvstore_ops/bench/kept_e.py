"""kept-e: E in the place of KV of a model with a KV head for every query head: bytes, and the time to usable KV."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.model_1b import build, prompts
from kvstore_ops.bench.result import Result, quartiles, show

CONTEXT = {"full": 4096, "quick": 2048, "tiny": 512}
RUNS = {"full": 5, "quick": 5, "tiny": 1}
TARGET = 0.9


def run(scale: str) -> Result:
    """Measure a fetch with projection over the projection alone, which is the limit when loading overlaps with it."""
    import torch
    from kvstore_client import ModelSpec
    from kvstore_client.engines.transformers import TransformersRunner
    from kvstore_client.recompute import dense_planes
    from kvstore_client.recompute.projecting import project_into

    model = build(scale, is_mha=True)
    spec = ModelSpec.from_transformers(model.config, model, keeps_e=True)
    runner = TransformersRunner(model, spec=spec)
    prompt = prompts(model, 1, CONTEXT[scale])[0]
    made: list[Any] = []

    def prefill() -> None:
        with torch.inference_mode():
            made[:] = [model(prompt, logits_to_keep=1, use_cache=True, output_hidden_states=True)]

    prefill_s = shared.timed(prefill)
    kept = [e[0].clone() for e in made[0].hidden_states[: spec.layer_count]]
    kv = [(layer.keys[0], layer.values[0]) for layer in made[0].past_key_values.layers]

    def project() -> None:
        planes = dense_planes(spec, CONTEXT[scale])
        for layer, (e, pair) in enumerate(zip(kept, planes, strict=True)):
            project_into(runner, layer, e, pair, spec.chunk_tokens)

    plain, tokens = replace(spec, keeps_e=False), prompt[0]
    fetched: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {"KV": [], "E": [], "projection": []}
    with shared.ready("full" if scale != "tiny" else "tiny") as (_, client):
        client.store(spec, tokens, kept).wait(60.0)
        client.store(plain, tokens, kv).wait(60.0)
        calls = {
            "KV": lambda: fetched.update(KV=client.fetch(plain, tokens)),
            "E": lambda: fetched.update(E=client.fetch_projected(runner, tokens)),
            "projection": project,
        }
        for number in range(RUNS[scale] + 1):
            for name, call in calls.items():
                took = shared.timed(call)
                if number:
                    seconds[name].append(took)
    assert [found.token_count for found in fetched.values()] == [CONTEXT[scale]] * 2
    for ours, theirs in zip(fetched["E"], kv, strict=True):
        for plane, other in zip(ours, theirs, strict=True):
            assert float((plane - other).abs().max()) <= 2**-6 * float(other.abs().max())
    return _result(scale, spec, {name: found.byte_count for name, found in fetched.items()}, seconds, prefill_s)


def _result(
    scale: str, spec: Any, sizes: dict[str, int], seconds: dict[str, list[float]], prefill_s: float
) -> Result:  # fmt: skip
    took = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = [alone / both for alone, both in zip(seconds["projection"], seconds["E"], strict=True)]
    ratio, even = statistics.median(ratios), sizes["KV"] / took["projection"]
    model = f"{spec.layer_count} layers, hidden {spec.hidden_size}, {spec.layers[0].kv_heads} heads of 64"
    show(
        f"kept-e: {CONTEXT[scale]} tokens, {model}",
        [
            ("KV fetched", f"{sizes['KV'] / 1e6:.0f} MB, usable after {took['KV']:.3f} s"),
            ("E fetched", f"{sizes['E'] / 1e6:.0f} MB, KV usable after {took['E']:.3f} s"),
            ("projection alone", f"{took['projection']:.3f} s: {ratio:.2f} of that"),
            ("prefill", f"{prefill_s:.3f} s"),
            ("E is sooner where bytes come at less than", f"{even / 1e9:.2f} GB/s, with this processor"),
        ],
    )
    return Result(
        name="kept-e", value=took["E"], unit="s", limit=took["projection"], ratio=ratio, target=f">= {TARGET}",
        met=ratio >= TARGET, runs=len(ratios), spread=quartiles(ratios),
        conditions={
            "scale": scale, "layers": spec.layer_count, "context": CONTEXT[scale], "dtype": "bfloat16", "device": "cpu",
            "bytes": sizes, "kv_s": took["KV"], "prefill_s": prefill_s, "even_bytes_per_s": even,
        },
    )  # fmt: skip
