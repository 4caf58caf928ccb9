"""The demo's table and its picture."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from kvstore_ops.demo.scene import Outcome

PHASES = {
    "lookup": "#8c8c8c",
    "prefill of what is missing": "#c44e52",
    "prefill of the question, layers landing meanwhile": "#4c72b0",
    "decode": "#cccccc",
}


def table(outcomes: list[Outcome]) -> Table:
    """One row per scene."""
    cold = outcomes[0]
    drawn = Table("scene", "TTFT", "tokens reused", "fetched", "speed-up", "tokens identical")
    for each in outcomes:
        rate = f"{each.fetched_bytes / each.fetch_s / 1e9:.2f} GB/s" if each.fetch_s else "-"
        drawn.add_row(
            each.name,
            f"{each.best_ttft_s:.3f} s",
            f"{each.reused_token_count:,} of {each.token_count:,}",
            rate,
            f"{cold.best_ttft_s / each.best_ttft_s:.1f}x",
            "-" if each is cold else "yes" if each.tokens == cold.tokens else "NO",
        )
    drawn.caption = (
        f"cold: the better of stepped ({cold.ttft_s:.2f} s) and one-pass prefill ({cold.one_pass_s:.2f} s). "
        "fetched: from the arena, while the model was computing"
    )
    return drawn


def picture(outcomes: list[Outcome], path: Path) -> None:
    """Two panels: the scenes to one scale, and the reused ones closer up."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(2, 1, figsize=(10, 4.8), height_ratios=[len(outcomes), 1.2])
    _bars(axes[0], outcomes)
    axes[0].set_title("Time from the call to each token (stepped prefill in both)", loc="left")
    warm = [each for each in outcomes if each.reused_token_count]
    _bars(axes[1], warm)
    axes[1].set_title("The same, closer up", loc="left")
    for axis in axes:
        axis.set_xlabel("seconds since the call")
        axis.set_xlim(left=0)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    handles = [Patch(color=color, label=name) for name, color in PHASES.items()]
    figure.legend(handles=handles, loc="lower center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axis, outcomes: list[Outcome]) -> None:  # type: ignore[no-untyped-def]  # matplotlib is skipped by mypy
    names = list(PHASES)
    for row, each in enumerate(reversed(outcomes)):
        kind = names[2] if each.reused_token_count else names[1]
        spans = [(names[0], each.lookup_s), (kind, each.prefill_s), (names[3], each.total_s - each.ttft_s)]
        start = 0.0
        for name, length in spans:
            axis.barh(row, length, left=start, color=PHASES[name], height=0.6)
            start += length
        axis.text(each.ttft_s, row + 0.34, f"first token {each.ttft_s:.2f} s", fontsize=8, ha="right", va="bottom")
        if each.fetch_s:
            axis.plot([each.lookup_s, each.lookup_s + each.fetch_s], [row - 0.36] * 2, color="#55a868", lw=3)
            axis.text(each.lookup_s, row - 0.4, "layers landing", fontsize=7, va="top", color="#55a868")
    axis.set_yticks(range(len(outcomes)), [f"{each.name} (pid {each.pid})" for each in reversed(outcomes)])
    axis.set_ylim(-0.8, len(outcomes) - 0.2)
