"""Recompute: reuse where exact prefixes end: the same text at another position, the cache of a sibling model, or both.
The stored caches are merged into one, and its wrong rows are computed again, as far as a ``Recompute`` setting says.

    from kvstore_client.recompute import GivenKV, Run, recompute
    result = recompute(runner, tokens, [Run(0, 512, GivenKV(kv), rotated_from=0)], Recompute(0, 2, 0.15))
    result.kv, result.logits, result.exactness, result.share

Needs torch, and an engine's ``ModelRunner``. A cache built on KV that was not exact is DERIVED; a full prefill, r = 1
from the embeddings and an exact prefix are EXACT. Cost: (layers of the group + the ratio of the rest) of a prefill of
the context, and the suffix. Loading overlaps, because the pass waits for a layer's bytes only when it computes it.

A partial prefill looks up stored caches (`inquiry`), decides (`kvstore.planning`) and acts (`arrivals`, `fused`).
`kvstore.planning` defines settings, plans and profiles, `kvstore_client.gate` the gate; neither needs torch.
"""

from kvstore.planning import Permit, Plan, PlannedRun, Profile, check_sender
from kvstore_client.gate import Gate
from kvstore_client.recompute.fused import recompute
from kvstore_client.recompute.merged import dense_planes
from kvstore_client.recompute.result import LayerTime, MergedKV, PartialPrefill, Recomputed, Timeline
from kvstore_client.recompute.runner import ModelRunner
from kvstore_client.recompute.runs import GivenKV, Run, Source

__all__ = [
    "Gate",
    "GivenKV",
    "LayerTime",
    "MergedKV",
    "ModelRunner",
    "PartialPrefill",
    "Permit",
    "Plan",
    "PlannedRun",
    "Profile",
    "Recomputed",
    "Run",
    "Source",
    "Timeline",
    "check_sender",
    "dense_planes",
    "recompute",
]
