"""Shared by ttft-blend and ttft-sibling: partial prefills through a real sidecar beside a full prefill in one pass."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from kvstore_client.setting import Recompute

from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Result, quartiles, show

CONTEXT = {"full": 4096, "quick": 4096, "tiny": 512}
SUFFIX = 64
RUNS = {"full": 5, "quick": 3, "tiny": 1}
SHARE_OF_IDEAL = 0.8
"""What the target leaves for loading, choosing and the suffix."""


def f_of(setting: Recompute, layer_count: int) -> float:
    """The share of a prefill's compute over the context that a setting needs."""
    group = setting.check_layer - setting.first_layer
    return (group + setting.ratio * (layer_count - setting.check_layer)) / layer_count


def measured(
    name: str, scale: str, model: Any, prompt: Any, settings: dict[str, Recompute], ask: Callable[[Recompute], Any]
) -> Result:
    """Pairs of a full prefill and each setting. ``ask`` runs one partial prefill, all of the context reused.

    The figure is the setting's that misses its own target 0.8 / f by most."""
    import torch

    layer_count = model.config.num_hidden_layers

    def whole() -> None:
        with torch.inference_mode():
            model(prompt, logits_to_keep=1)

    full: list[float] = []
    seconds: dict[str, list[float]] = {each: [] for each in settings}
    last: dict[str, Any] = {}
    for each, setting in settings.items():
        last[each] = ask(setting)
    for _ in range(RUNS[scale]):
        full.append(shared.timed(whole))
        for each, setting in settings.items():
            last[each] = None  # its memory is the next one's
            last[each] = ask(setting)
            assert not last[each].plan.reason, last[each].plan.reason
            seconds[each].append(last[each].timeline.total_s)
    rows = [("full prefill, one pass", f"{statistics.median(full):.3f} s")]
    conditions: dict[str, Any] = {"scale": scale, "layers": layer_count, "context": CONTEXT[scale], "suffix": SUFFIX,
                                  "dtype": "bfloat16", "device": "cpu", "settings": {}}  # fmt: skip
    ratios, targets = {}, {}
    for each, setting in settings.items():
        f, timeline = f_of(setting, layer_count), last[each].timeline
        pairs = [slow / fast for slow, fast in zip(full, seconds[each], strict=True)]
        ratios[each], targets[each] = pairs, SHARE_OF_IDEAL / f
        ratio = statistics.median(pairs)
        rows.append(
            (each, f"{statistics.median(seconds[each]):.3f} s, {ratio:.2f}x at f {f:.3f}; target {targets[each]:.2f}x")
        )
        rows.append(("  of which, last run", (
            f"prepared in {timeline.prepare_s:.3f} s, load {timeline.load_s:.3f}, recompute {timeline.recompute_s:.3f}, "
            f"suffix {timeline.suffix_s:.3f} s"
        )))  # fmt: skip
        conditions["settings"][each] = {
            "f": f, "ratio": ratio, "target": targets[each], "prepare_s": timeline.prepare_s, "load_s": timeline.load_s,
            "recompute_s": timeline.recompute_s, "suffix_s": timeline.suffix_s,
        }  # fmt: skip
    show(f"{name}: {CONTEXT[scale]} + {SUFFIX} tokens, {layer_count} layers", rows)
    medians = {each: statistics.median(pairs) for each, pairs in ratios.items()}
    worst = min(medians, key=lambda each: medians[each] / targets[each])
    return Result(
        name=name, value=statistics.median(seconds[worst]), unit="s", limit=statistics.median(full),
        ratio=medians[worst], target=f">= 0.8 / f = {targets[worst]:.2f}", met=medians[worst] >= targets[worst],
        runs=len(full), spread=quartiles(ratios[worst]), conditions=conditions,
    )  # fmt: skip
