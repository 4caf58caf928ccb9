"""Shared by ttft-blend and ttft-sibling: partial prefills through a real sidecar beside a full prefill in one pass."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.planning import Recompute
from kvstore_ops.bench import card
from kvstore_ops.bench.memory import Held
from kvstore_ops.bench.result import Goal, Result, judged_by, note, quartiles, show

CONTEXT = {"full": 4096, "quick": 4096, "tiny": 512}
SUFFIX = 64
RUNS = {"full": 3, "quick": 3, "tiny": 1}
SHARE_OF_IDEAL = 0.8
"""The share of the ideal speed-up 1 / f that the target asks for; the rest is for loading, choosing and the suffix."""


@dataclass(frozen=True)
class Asked:
    """A prompt ([1, tokens]), of which ``context`` tokens are to be reused, by each of the settings. ``ask`` runs one
    partial prefill."""

    runner: Any
    prompt: Any
    settings: dict[str, Recompute]
    documents: list[range]
    context: int
    ask: Callable[[Recompute], Any]

    @property
    def spec(self) -> Any:
        return self.runner.spec


def measured(
    name: str, scale: str, model: Any, found: Asked, held_by: Callable[[], tuple[dict[str, Held], int]]
) -> Result:  # fmt: skip
    """Measure pairs of a full prefill and each setting, on the model's device. ``held_by``: measures the peak memory of
    each setting, and of a full prefill.

    The figure is that of the setting with the least ratio to its own target 0.8 / f."""
    layer_count, settings, context = model.config.num_hidden_layers, found.settings, found.context
    note(f"{name}: memory")
    held, full_bytes = held_by()
    full, seconds, last = _pairs(name, scale, model, found)
    rows = [("full prefill, one pass", f"{statistics.median(full):.3f} s, memory grew by {full_bytes / 1e6:.0f} MB")]
    figures: dict[str, dict[str, Any]] = {}
    for each, setting in settings.items():
        f, time = setting.carried_share(layer_count), last[each].timeline
        ratio = statistics.median(slow / fast for slow, fast in zip(full, seconds[each], strict=True))
        parts = {"prepare_s": time.prepare_s, "load_s": time.load_s, "recompute_s": time.recompute_s,
                 "suffix_s": time.suffix_s}  # fmt: skip
        figures[each] = {"f": f, "ratio": ratio, "target": SHARE_OF_IDEAL / f, **parts}
        figures[each] |= {**asdict(held[each]), "is_within": held[each].is_within, "why_less": last[each].plan.reason}
        took = statistics.median(seconds[each])
        rows.append((each, f"{took:.3f} s, {ratio:.2f}x at f {f:.3f}; target {SHARE_OF_IDEAL / f:.2f}x"))
        rows.append(("  last run", ", ".join(f"{name[:-2]} {spent:.3f}" for name, spent in parts.items()) + " s"))
        rows.append(("  memory", str(held[each])))
    show(f"{name}: {context} + {SUFFIX} tokens, {layer_count} layers", rows)
    worst = min(figures, key=lambda each: figures[each]["ratio"] / figures[each]["target"])
    ratio, less = figures[worst]["ratio"], [each["why_less"] for each in figures.values()]
    return Result(
        name=name, value=statistics.median(seconds[worst]), unit="s", limit=statistics.median(full), ratio=ratio,
        **judged_by(
            *(Goal(f"{each}: 0.8 / f", found["ratio"], found["target"]) for each, found in figures.items()),
            Goal("settings that reused less", sum(map(bool, less)), 0, is_upper=True),
        ), runs=len(full),
        spread=quartiles([slow / fast for slow, fast in zip(full, seconds[worst], strict=True)]),
        conditions={
            "scale": scale, "layers": layer_count, "context": context, "suffix": SUFFIX, "dtype": "bfloat16",
            "device": model.device.type, "judged": worst, "settings": figures,
            "full_resident_bytes": full_bytes,
        },
    )  # fmt: skip


def _pairs(
    name: str, scale: str, model: Any, found: Asked
) -> tuple[list[float], dict[str, list[float]], dict[str, Any]]:
    """Return the seconds of the full prefills, those of each setting beside them, and each setting's last result."""
    import torch

    def whole() -> None:
        with torch.inference_mode():
            model(prompt, logits_to_keep=1)

    device = model.device.type
    prompt = found.prompt.to(device)
    if device != "cpu":
        whole()  # the first pass of this shape also chooses and loads kernels
    full: list[float] = []
    seconds: dict[str, list[float]] = {each: [] for each in found.settings}
    last: dict[str, Any] = {each: found.ask(setting) for each, setting in found.settings.items()}
    for number in range(1, RUNS[scale] + 1):
        full.append(card.timed(device, whole))
        note(f"{name}: run {number} of {RUNS[scale]}, full prefill {full[-1]:.3f} s")
        for each, setting in found.settings.items():
            last[each] = None  # frees the memory of the last result for the next
            last[each] = found.ask(setting)
            if last[each].plan.reason:
                note(f"{name}: less was reused: {last[each].plan.reason}")
            seconds[each].append(last[each].timeline.total_s)
    return full, seconds, last
