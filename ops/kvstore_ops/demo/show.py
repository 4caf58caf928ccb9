"""The demo's table and its picture."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from kvstore_ops.demo.scene import Outcome

PHASES = {
    "lookup": "#8c8c8c",
    "prefill of what is missing": "#c44e52",
    "prefill of the question": "#4c72b0",
    "decode": "#cccccc",
}


LANDING = "#55a868"
WHERE = {"none": "-", "dram": "arena", "nvme": "device", "redis": "Redis"}


def table(outcomes: list[Outcome], source: str) -> Table:
    """Draw one row per scene, 80 columns wide. ``source``: the counter of the bytes read from the device."""
    cold = outcomes[0]
    drawn = Table("scene", "TTFT", "reused", "from", "fetched", "read from device", "faster", "same tokens")
    for column in (0, 1, 4):
        drawn.columns[column].no_wrap = True
    for each in outcomes:
        rate = f"{each.fetched_bytes / each.fetch_s / 1e9:.1f} GB/s" if each.fetch_s else "-"
        drawn.add_row(
            each.name,
            f"{each.best_ttft_s:.3f} s",
            f"{each.reused_token_count:,}",
            WHERE[each.tier],
            rate,
            f"{each.device_bytes / 1e6:.0f} MB",
            f"{cold.best_ttft_s / each.best_ttft_s:.1f}x",
            "-" if each is cold else "yes" if each.tokens == cold.tokens else "NO",
        )
    drawn.caption = (
        f"reused: of {cold.token_count:,} tokens. cold: the better of stepped ({cold.ttft_s:.2f} s) and one-pass "
        f"prefill ({cold.one_pass_s:.2f} s). fetched: while the model was computing. read from device: says {source}"
    )
    return drawn


def picture(outcomes: list[Outcome], path: Path) -> None:
    """Draw two panels: all scenes to one scale, and the scenes with reuse closer up."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    warm = [each for each in outcomes if each.reused_token_count]
    figure, axes = plt.subplots(2, 1, figsize=(10, 6), height_ratios=[len(outcomes), len(warm) + 0.6])
    _bars(axes[0], outcomes)
    axes[0].set_title("From the call to the last of 16 tokens (the prompt is computed in steps)", loc="left")
    _bars(axes[1], warm, landing=True)
    axes[1].set_title("The same, closer up", loc="left")
    for axis in axes:
        axis.set_xlabel("seconds since the call")
        axis.set_xlim(left=0)
        axis.margins(x=0.18)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    handles = [Patch(color=color, label=name) for name, color in PHASES.items()]
    handles.append(Patch(color=LANDING, label="layers landing meanwhile"))
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axis, outcomes: list[Outcome], *, landing: bool = False) -> None:  # type: ignore[no-untyped-def]  # matplotlib is skipped by mypy
    names = list(PHASES)
    for row, each in enumerate(reversed(outcomes)):
        kind = names[2] if each.reused_token_count else names[1]
        spans = [(names[0], each.lookup_s), (kind, each.prefill_s), (names[3], each.total_s - each.ttft_s)]
        start = 0.0
        for name, length in spans:
            axis.barh(row, length, left=start, color=PHASES[name], height=0.56)
            start += length
        axis.annotate(
            f"first token {each.ttft_s:.2f} s",
            (start, row),
            (6, 0),
            textcoords="offset points",
            fontsize=9,
            va="center",
        )
        if landing and each.fetch_s:
            axis.barh(row - 0.37, each.fetch_s, left=each.lookup_s, color=LANDING, height=0.12)
    axis.set_yticks(range(len(outcomes)), [_label(each) for each in reversed(outcomes)], fontsize=9)
    axis.set_ylim(-0.6, len(outcomes) - 0.5)


def _label(each: Outcome) -> str:
    where = f", from {'' if each.tier == 'redis' else 'the '}{WHERE[each.tier]}" if each.reused_token_count else ""
    return f"{each.name}{where}\nengine {each.pid}, sidecar {each.sidecar_pid}"
