"""ttft-blend: the time of a full prefill over that of a partial prefill, which moves caches of documents that were
computed alone to their places, and computes a share again. Only speed is measured, at fixed settings: the weights are
random. The benchmark quality measures the answers of such settings."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvstore.planning import Recompute
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.memory import held_apart
from kvstore_ops.bench.model_1b import build, prompts
from kvstore_ops.bench.recomputed import CONTEXT, SUFFIX, Asked, measured
from kvstore_ops.bench.result import Result, note

DOCUMENTS = 4


def settings_of(layer_count: int) -> dict[str, Recompute]:
    """Return two settings: an eighth of the layers and 15 % of the tokens behind them; no whole layer and 20 % of the
    tokens by the suffix's attention."""
    group = max(1, layer_count // 8)
    return {
        f"first {group} of {layer_count} layers, 15 % by deviation": Recompute.cacheblend(group, 0.15),
        "no whole layer, 20 % by suffix attention": Recompute(0, -1, 0.2, "suffix_attention"),
    }


def asked(scale: str, model: Any, client: Any, context: int | None = None) -> Asked:
    """Return a prompt of documents that were computed alone. ``context``: their tokens (None: the scale's)."""
    from kvstore_client.engines.transformers_runner import TransformersRunner

    from kvstore.spec import ModelSpec

    runner = TransformersRunner(model, spec=ModelSpec.from_transformers(model.config, "unverified:blend", 256))
    context = context or CONTEXT[scale]
    prompt = prompts(model, 1, context + SUFFIX)[0]
    tokens = prompt[0].numpy()
    size = context // DOCUMENTS
    documents = [range(start, start + size) for start in range(0, context, size)]
    return Asked(
        runner, prompt, settings_of(runner.spec.layer_count), documents, context,
        lambda setting: client.partial_prefill(runner, tokens, segments=documents, recompute=setting),
    )  # fmt: skip


def run(scale: str) -> Result:
    """Measure partial prefills. The documents' KV come from the sidecar layer by layer, while layers are computed."""
    model = build(scale)
    with shared.ready("full" if scale != "tiny" else "tiny") as (sidecar, client):
        found = asked(scale, model, client)
        keep("ttft-blend", found, client)
        held = partial(held_apart, "ttft-blend", scale, sidecar.address)
        return measured("ttft-blend", scale, model, found, held)


def keep(name: str, found: Asked, client: Any) -> None:
    """Compute and store each document by itself."""
    from kvstore_client.recompute import recompute

    for document in found.documents:
        note(f"{name}: computing and storing tokens {document.start} to {document.stop} by themselves")
        tokens = found.prompt[0, document.start : document.stop].numpy()
        alone = recompute(found.runner, tokens, [], Recompute.full(found.spec.layer_count))
        client.store_segment(found.spec, tokens, alone.kv).wait(60.0)
