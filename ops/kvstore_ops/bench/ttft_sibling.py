"""ttft-sibling: the time of a full prefill over that of a partial prefill, which reuses a sibling's cache and computes
a quarter of the layers again from its E. Only speed is measured: the weights are random. The benchmark quality measures
the answers of such settings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from kvstore.planning import Recompute
from kvstore.spec import ModelSpec
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.memory import held_apart
from kvstore_ops.bench.model_1b import build, prompts
from kvstore_ops.bench.recomputed import CONTEXT, SUFFIX, Asked, measured
from kvstore_ops.bench.result import Result, note


def asked(scale: str, model: Any, client: Any, context: int | None = None) -> Asked:
    """Return a prompt that a sibling has computed, to be reused from E at three eighths of the depth. ``context``: the
    tokens that it has computed (None: the scale's)."""
    from kvstore_client.engines.transformers_runner import TransformersRunner

    runner = TransformersRunner(model, spec=ModelSpec.from_transformers(model.config, "unverified:receiver", 256))
    layer_count = runner.spec.layer_count
    first = layer_count * 3 // 8
    setting = Recompute.droidspeak(first, first + max(1, layer_count // 4) - 1)
    context = context or CONTEXT[scale]
    prompt = prompts(model, 1, context + SUFFIX)[0]
    tokens, sender = prompt[0].numpy(), sender_of(runner.spec)
    return Asked(
        runner, prompt, {f"layers {first}..{setting.last_layer} from E": setting}, [], context,
        lambda each: client.partial_prefill(runner, tokens, senders=(sender,), recompute=each),
    )  # fmt: skip


def sender_of(spec: ModelSpec) -> ModelSpec:
    return replace(spec, model_id="sibling", weights_digest="unverified:sender")


def run(scale: str) -> Result:
    """Measure partial prefills. The sibling's KV and E come from the sidecar layer by layer, while layers are
    computed."""
    model = build(scale)
    with shared.ready("full" if scale != "tiny" else "tiny") as (sidecar, client):
        found = asked(scale, model, client)
        keep("ttft-sibling", found, client)
        held = partial(held_apart, "ttft-sibling", scale, sidecar.address)
        return measured("ttft-sibling", scale, model, found, held)


def keep(name: str, found: Asked, client: Any) -> None:
    """Compute and store the context as the sibling."""
    from kvstore_client.recompute import recompute

    (setting,) = found.settings.values()
    context = found.prompt[0, : found.context].numpy()
    note(f"{name}: computing and storing {found.context} tokens as the sibling")
    everything = Recompute.full(found.spec.layer_count)
    theirs = recompute(found.runner, context, [], everything, hidden_layers=(setting.first_layer,))
    client.store(sender_of(found.spec), context, theirs.kv, hidden=theirs.hidden).wait(60.0)
