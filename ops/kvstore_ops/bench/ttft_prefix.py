"""ttft-prefix: the time of a full prefill over that with a cached prefix, for 4,096 tokens and a suffix of 64."""

from __future__ import annotations

import statistics

from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.model_1b import build, prompts
from kvstore_ops.bench.result import Result, note, quartiles, show

CONTEXT = {"full": 4096, "quick": 4096, "tiny": 512}
SUFFIX = 64
RUNS = {"full": 5, "quick": 3, "tiny": 1}
TARGET = 10.0


def run(scale: str) -> Result:
    """Measure interleaved pairs. Full prefill is one pass without a sidecar, because that is its fastest form."""
    import torch
    from kvstore_client.engines.transformers import CachedModel

    model = build(scale)
    prompt = prompts(model, 1, CONTEXT[scale] + SUFFIX)[0]
    with shared.ready("full" if scale != "tiny" else "tiny") as (_, client):
        cached = CachedModel(model, client)
        note("ttft-prefix: the prompt, cold")
        cold = cached.generate(prompt, max_new_tokens=1, do_sample=False)
        assert cold.report.wait_stored(60.0).name == "MEMORY"
        cached.generate(prompt, max_new_tokens=1, do_sample=False)

        def whole() -> None:
            with torch.inference_mode():
                model(prompt, logits_to_keep=1)

        full, warm, fetched = [], [], 0
        for number in range(1, RUNS[scale] + 1):
            full.append(shared.timed(whole))
            note(f"ttft-prefix: run {number} of {RUNS[scale]}, full prefill {full[-1]:.1f} s")
            output = cached.generate(prompt, max_new_tokens=1, do_sample=False)
            assert bool((output.sequences == cold.sequences).all())
            warm.append(output.report.ttft_s)
            fetched = output.report.fetched_bytes
        cached.close()
    ratios = [slow / fast for slow, fast in zip(full, warm, strict=True)]
    ratio = statistics.median(ratios)
    show(
        f"ttft-prefix: {CONTEXT[scale]} + {SUFFIX} tokens, {model.config.num_hidden_layers} layers",
        [
            ("cached", f"{statistics.median(warm):.3f} s, {fetched / 1e6:.0f} MB fetched, {ratio:.1f}x faster"),
            ("full prefill, one pass", f"{statistics.median(full):.3f} s"),
            ("cold through the adapter, stepped", f"{cold.report.ttft_s:.3f} s"),
        ],
    )
    return Result(
        name="ttft-prefix", value=statistics.median(warm), unit="s", limit=statistics.median(full), ratio=ratio,
        target=f">= {TARGET:.0f}", met=ratio >= TARGET, runs=len(full), spread=quartiles(ratios),
        conditions={"scale": scale, "layers": model.config.num_hidden_layers, "dtype": "bfloat16", "device": "cpu"},
    )  # fmt: skip
