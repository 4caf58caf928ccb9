"""quality: accuracy of reuse over full prefill, each with f, the share of a prefill's compute.

Measured are held-out contexts of the testbed, per trained model and kind of reuse. Most settings of the table are fixed
controls: the papers' settings, and others. The judged setting is the one that clients take by the profile that comes
with the weights (made by ``kvstore profile`` on calibration contexts), where there is one; evaluation contexts chose no
setting. f counts rows times layers; it is no time, and these figures say nothing about speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvstore.planning import Recompute
from kvstore_ops.bench.result import Result

TARGET = 0.99
CONTEXTS = {"full": 256, "quick": 48, "tiny": 8}
SIBLING = "plus3"


@dataclass(frozen=True)
class Row:
    """One line of a table: accuracy with its standard error over contexts. ``over_full``: the ratio to full prefill's
    accuracy; its error comes from the differences context by context."""

    model: str
    reuse: str
    setting: str
    share: float
    accuracy: float
    standard_error: float
    over_full: float
    over_full_error: float


def fixed(layer_count: int, reuse: str) -> Iterator[tuple[str, Recompute, bool]]:
    """Yield (name, setting, whether keys are rotated to their new positions): the papers' settings, and controls."""
    third, half = layer_count // 3, layer_count // 2
    yield "full reuse", Recompute.reuse(), True
    if reuse != "sibling":
        yield "full reuse, keys not rotated", Recompute.reuse(), False
    yield "random 15 %", Recompute(0, -1, 0.15, "random"), True
    yield "first 15 % of each chunk (EPIC)", Recompute(0, -1, 0.15, "first"), True
    for check in sorted({1, 2, third, half}):
        yield f"CacheBlend, check layer {check}, 15 %", Recompute.cacheblend(check, 0.15), True
    yield f"CacheBlend, check layer {third}, 15 %, gradual", replace(
        Recompute.cacheblend(third, 0.15), gradual=0.3
    ), True  # fmt: skip
    yield f"random 15 % after layer {half - 1}", Recompute(0, half - 1, 0.15, "random"), True
    yield f"deviation x suffix attention, check layer {third}, 15 %", Recompute(0, third - 1, 0.15, "product"), True
    for ratio in (0.15, 0.3):
        yield f"suffix attention alone, {ratio:.0%}", Recompute(0, -1, ratio, "suffix_attention"), True
    if reuse != "position":
        yield f"DroidSpeak, layers 0..{half - 1}", Recompute.droidspeak(0, half - 1), True
        yield (
            f"DroidSpeak, layers {third}..{third + half - 1}, from E",
            Recompute.droidspeak(third, third + half - 1),
            True,
        )
        yield f"fused: layers 1..{half - 1} from E, 15 %", Recompute(1, half - 1, 0.15), True


class Bench:
    """All models and kinds of reuse of one run."""

    def __init__(self, scale: str, progress: Progress) -> None:
        self._scale = scale
        self._progress = progress
        self.rows: list[Row] = []
        self.judged: list[Row] = []

    def measure(self, model: str, reuse: Any) -> None:
        """Measure the rows of one table; the judged row is the last."""
        from kvstore_ops.profiling.profiler import told
        from kvstore_ops.testbed import contexts, evaluation
        from kvstore_ops.testbed.trial import Trial

        sender = _sender(model, reuse)
        trial = Trial(model, contexts(evaluation(), CONTEXTS[self._scale]), reuse, sender)
        full = trial.full()
        self.rows.append(Row(model, reuse, "full prefill", 1.0, full.accuracy, full.standard_error, 1.0, 0.0))
        settings = list(fixed(trial.layer_count, reuse))
        if self._scale == "tiny":
            settings = settings[:1]
        for name, setting, turned in self._progress.track(settings, description=f"{model}, {reuse}"):
            self._add(name, trial, setting, full, turned=turned)
        taken = chosen(trial.layer_count, model, reuse, sender)
        if taken is not None:
            name = f"by its profile: {told(taken)}"
            self.judged.append(self._add(name, trial, taken, full, turned=True))

    def _add(self, name: str, trial: Any, setting: Recompute, full: Any, *, turned: bool) -> Row:
        found = trial.run(setting, turned=turned)
        own = found.score
        row = Row(
            trial.receiver, trial.reuse, name, found.share, own.accuracy, own.standard_error, *own.over(full)
        )  # fmt: skip
        self.rows.append(row)
        return row


def _sender(model: str, reuse: str) -> str | None:
    return None if reuse == "position" else f"{model}-{SIBLING}"


def chosen(layer_count: int, model: str, reuse: Any, sender: str | None) -> Recompute | None:
    """Return the setting that clients take by the shipped profile; None: no such profile is shipped."""
    from kvstore_ops.profiling.shipped import shipped_path, shipped_profile

    if not shipped_path(model, reuse, sender).exists():
        return None
    point = shipped_profile(model, reuse, sender).cheapest(TARGET)
    return point.setting if point else Recompute.full(layer_count)


def tables(rows: list[Row]) -> None:
    """Print a table per model and kind of reuse."""
    for model, reuse in dict.fromkeys((row.model, row.reuse) for row in rows):
        table = Table(title=f"{model}, reuse: {reuse}", title_justify="left")
        for name in ("setting", "f", "accuracy", "over full prefill"):
            table.add_column(name, justify="left" if name == "setting" else "right")
        for row in rows:
            if (row.model, row.reuse) == (model, reuse):
                accuracy = f"{row.accuracy:.3f} +- {row.standard_error:.3f}"
                over = f"{row.over_full:.3f} +- {row.over_full_error:.3f}"
                table.add_row(row.setting, f"{row.share:.3f}", accuracy, over)
        Console().print(table)


def run(scale: str) -> Result:
    """Measure all tables. The figure is the worst judged ratio, with its f. A row is judged where a profile is
    shipped."""
    from kvstore_ops.testbed import shipped
    from kvstore_ops.testbed.trial import one_thread

    bases = [name for name in shipped() if name.count("-") == 1]
    kinds = [(base, reuse) for base in bases for reuse in ("position", "sibling", "both")]
    kinds = [each for each in kinds if _sender(*each) is None or _sender(*each) in shipped()]
    if scale != "full":
        kinds = [each for each in kinds if each[0] == bases[0]]
    if scale == "tiny":
        kinds = kinds[:1]
    with one_thread(), Progress(console=Console(stderr=True), transient=True) as progress:
        bench = Bench(scale, progress)
        for model, reuse in kinds:
            bench.measure(model, reuse)
    tables(bench.rows)
    worst = min(bench.judged, key=lambda row: row.over_full)
    ratios = [row.over_full for row in bench.judged]
    return Result(
        name="quality", value=worst.share, unit="share of a prefill's compute (f)", limit=1.0, ratio=worst.over_full,
        target=f">= {TARGET}", met=worst.over_full >= TARGET, runs=CONTEXTS[scale], spread=(min(ratios), max(ratios)),
        conditions={
            "scale": scale, "contexts": CONTEXTS[scale], "seeds": "evaluation; profiled on calibration",
            "judged": [asdict(row) for row in bench.judged], "worst": f"{worst.model}, {worst.reuse}: {worst.setting}",
            "standard_error": worst.over_full_error,
            "below_target": [f"{row.model}, {row.reuse}" for row in bench.judged if row.over_full < TARGET],
        },
    )  # fmt: skip
