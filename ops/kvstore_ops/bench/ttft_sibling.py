"""ttft-sibling: full prefill over a sibling's cache, a quarter of the layers computed again from its E. Speed only:
the weights are random, and how well such a setting answers is another benchmark's (quality)."""

from __future__ import annotations

from dataclasses import replace

from kvstore_client.setting import Recompute

from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.model_1b import build, prompts
from kvstore_ops.bench.recomputed import CONTEXT, SUFFIX, measured
from kvstore_ops.bench.result import Result


def run(scale: str) -> Result:
    """The sibling's KV and E come from the sidecar, layer by layer, while others are computed."""
    from kvstore_client.engines.transformers_runner import TransformersRunner
    from kvstore_client.recompute import recompute

    from kvstore.spec import ModelSpec

    model = build(scale)
    runner = TransformersRunner(model, spec=ModelSpec.from_transformers(model.config, "unverified:receiver", 256))
    sender = replace(runner.spec, model_id="sibling", weights_digest="unverified:sender")
    layer_count = runner.spec.layer_count
    first = layer_count * 3 // 8
    setting = Recompute.droidspeak(first, first + max(1, layer_count // 4) - 1)
    prompt = prompts(model, 1, CONTEXT[scale] + SUFFIX)[0]
    tokens = prompt[0].numpy()
    context = tokens[: CONTEXT[scale]]
    with shared.ready("full" if scale != "tiny" else "tiny") as (_, client):
        theirs = recompute(runner, context, [], Recompute.full(layer_count), hidden_layers=(setting.first_layer,))
        client.store(sender, context, theirs.kv, hidden=theirs.hidden).wait(60.0)
        del theirs
        return measured(
            "ttft-sibling", scale, model, prompt, {f"layers {first}..{setting.last_layer} from E": setting},
            lambda each: client.partial_prefill(runner, tokens, senders=(sender,), recompute=each),
        )  # fmt: skip
