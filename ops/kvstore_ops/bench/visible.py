"""visible: stored bytes per second until another client can fetch them, over the copy limit.

Two bare copies, and nothing else, are half of that limit: a client may write to its staging at any time, so that its
bytes are copied a second time, and only then hashed. Beside it stands what is possible: bare threads that copy
everything, copy it again and hash it.
"""

from __future__ import annotations

import statistics

from kvstore_ops.bench.result import Result, quartiles, show
from kvstore_ops.bench.store import measure

TARGET = 0.50


def run(scale: str) -> Result:
    """Measure from the call of store to the other client's lookup, which hits everything."""
    figures = measure(scale)
    byte_count, visible, limits = figures["bytes"], figures["visible"], figures["limits"]
    ratios = [limit / mine for mine, limit in zip(visible, limits, strict=True)]
    ratio = statistics.median(ratios)
    possible = statistics.median(bare / mine for mine, bare in zip(visible, figures["checked"], strict=True))
    checked = byte_count / statistics.median(figures["checked"])
    rate, limit = byte_count / statistics.median(visible), byte_count / statistics.median(limits)
    show(
        f"visible: {byte_count >> 20} MiB, {len(visible)} pairs",
        [
            ("until another client hits", f"{rate / 1e9:.2f} GB/s, {ratio:.3f} of the copy limit"),
            ("copy limit, 2 threads", f"{limit / 1e9:.2f} GB/s"),
            ("  bare: copied, copied, hashed", f"{checked / 1e9:.2f} GB/s, ours {possible:.3f}"),
        ],
    )
    return Result(
        name="visible", value=rate, unit="B/s", limit=limit, ratio=ratio, target=f">= {TARGET}", met=ratio >= TARGET,
        runs=len(visible), spread=quartiles(ratios),
        conditions={"scale": scale, "bytes": byte_count, "warm": True, "checked_ratio": possible},
    )  # fmt: skip
