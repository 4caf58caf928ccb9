"""A profile as a table of its frontier, and as a plot of all measured points."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from kvstore.planning import Point, Profile
from kvstore.planning.profile import ERRORS
from kvstore_ops.profiling.profiler import Profiled, told


def table(profile: Profile, floor: float) -> Table:
    """Draw the frontier; the setting that clients take at this floor is bold."""
    chosen = profile.cheapest(floor)
    sender = f" from {profile.sender.model_id}" if profile.sender else ""
    title = (
        f"{profile.receiver.model_id}{sender}, reuse: {profile.reuse}; {profile.calibration.contexts} contexts; "
        f"full prefill {profile.full_quality:.3f} +- {profile.full_standard_error:.3f}"
    )
    found = Table(
        "setting", "f", "quality", "over full prefill", "tokens", "KL", "misled", title=title, title_justify="left"
    )
    for point in profile.points:
        over = point.quality / profile.full_quality if profile.full_quality else 0.0
        error = point.loss_error / profile.full_quality if profile.full_quality else 0.0
        found.add_row(
            told(point.setting),
            f"{point.share:.3f}",
            f"{point.quality:.3f} +- {point.standard_error:.3f}",
            f"{over:.3f} +- {error:.3f}",
            "" if point.tokens is None else f"{point.tokens:.3f}",
            "" if point.kl is None else f"{point.kl:.3f}",
            f"{point.misled:.3f}",
            style="bold" if point == chosen else None,
        )
    return found


def verdict(profile: Profile, floor: float) -> str:
    """Return in words what clients do with the profile at this floor."""
    chosen = profile.cheapest(floor)
    if chosen is None:
        return (
            f"no setting keeps {floor:g} of full prefill's quality, less {ERRORS:g} standard errors: prompts are "
            "prefilled; more contexts have smaller errors"
        )
    return f"at floor {floor:g} clients take: {told(chosen.setting)}, at f = {chosen.share:.3f}"


def plot(found: Profiled, floor: float, path: Path) -> None:
    """Quality over f: every point by its selector, as the search had it; the frontier with standard errors, as it was
    measured again; full prefill and the floor."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    profile = found.profile
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    try:
        for kind in sorted({_kind(point) for point in found.points}):
            those = [point for point in found.points if _kind(point) == kind]
            axes.scatter([p.share for p in those], [p.quality for p in those], s=18, alpha=0.6, label=kind)
        edge = profile.points
        axes.errorbar(
            [p.share for p in edge], [p.quality for p in edge], [p.standard_error for p in edge],
            color="black", linewidth=1, capsize=2, drawstyle="steps-post", label="Pareto frontier",
        )  # fmt: skip
        axes.axhline(profile.full_quality, color="black", linestyle="--", linewidth=0.8, label="full prefill")
        axes.axhline(profile.full_quality * floor, color="gray", linestyle=":", linewidth=0.8, label=f"floor {floor:g}")
        chosen = profile.cheapest(floor)
        if chosen is not None:
            axes.plot(chosen.share, chosen.quality, "*", color="red", markersize=16, label=told(chosen.setting))
        axes.set(xlim=(-0.02, 1.02), ylim=(0, 1.02), xlabel="f, the share of a prefill's compute", ylabel="quality")
        sender = f" from {profile.sender.model_id}" if profile.sender else ""
        axes.set_title(f"{profile.receiver.model_id}{sender}, {profile.reuse}, {profile.calibration.contexts} contexts")
        axes.legend(fontsize=8, loc="lower right")
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)


def _kind(point: Point) -> str:
    return point.setting.selector if point.setting.ratio else "layers alone"
