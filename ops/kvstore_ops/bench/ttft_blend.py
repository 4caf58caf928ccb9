"""ttft-blend: full prefill over documents' caches that were computed alone, moved to their places and mended.
Speed only, at literal settings: the weights are random, and how well such settings answer is another benchmark's."""

from __future__ import annotations

from kvstore_client.setting import Recompute

from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.model_1b import build, prompts
from kvstore_ops.bench.recomputed import CONTEXT, SUFFIX, measured
from kvstore_ops.bench.result import Result

DOCUMENTS = 4


def settings_of(layer_count: int) -> dict[str, Recompute]:
    """An eighth of the layers, 15 % of the tokens behind them; no whole layer, 20 % by the suffix's attention."""
    group = max(1, layer_count // 8)
    return {
        f"first {group} of {layer_count} layers, 15 % by deviation": Recompute.cacheblend(group, 0.15),
        "no whole layer, 20 % by suffix attention": Recompute(0, -1, 0.2, "suffix_attention"),
    }


def run(scale: str) -> Result:
    """The documents' KV come from the sidecar, layer by layer, while others are computed."""
    from kvstore_client.engines.transformers_runner import TransformersRunner
    from kvstore_client.recompute import recompute

    from kvstore.spec import ModelSpec

    model = build(scale)
    runner = TransformersRunner(model, spec=ModelSpec.from_transformers(model.config, "unverified:blend", 256))
    layer_count = runner.spec.layer_count
    prompt = prompts(model, 1, CONTEXT[scale] + SUFFIX)[0]
    tokens = prompt[0].numpy()
    size = CONTEXT[scale] // DOCUMENTS
    documents = [range(start, start + size) for start in range(0, CONTEXT[scale], size)]
    with shared.ready("full" if scale != "tiny" else "tiny") as (_, client):
        for document in documents:
            alone = recompute(runner, tokens[document.start : document.stop], [], Recompute.full(layer_count))
            client.store_segment(runner.spec, tokens[document.start : document.stop], alone.kv).wait(60.0)
        return measured(
            "ttft-blend", scale, model, prompt, settings_of(layer_count),
            lambda each: client.partial_prefill(runner, tokens, segments=documents, recompute=each),
        )  # fmt: skip
