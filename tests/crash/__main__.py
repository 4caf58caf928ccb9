"""python -m tests.crash --count 100 --seed 0"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.crash.campaign import OUTSIDE, Outcome, run
from tests.crash.plan import POINTS


def report(outcome: Outcome, seconds: float) -> str:
    """The histogram and the totals."""
    found = outcome.findings
    lines = [f"{outcome.hits[point]:5d}  {point}" for point in (*POINTS, OUTSIDE)]
    lines.append(
        f"{outcome.crash_count} crashes in {seconds:.0f} s; {found.acknowledged} chains acknowledged, checked "
        f"{found.checked} times: {len(found.wrong)} wrong, {len(found.lost)} lost, {found.evicted} evicted, "
        f"{found.flipped} spoiled on purpose"
    )
    for name, items in (("WRONG", found.wrong), ("LOST", found.lost), ("ALSO", found.other)):
        lines += [f"{name}: {item}" for item in items[:20]]
    lines += [f"NOT REACHED: {point}" for point in outcome.missed]
    return "\n".join(lines)


def main() -> int:
    """0 when nothing was lost or wrong and every point was hit."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description="Kill the server, and look.")
    parser.add_argument("--count", type=int, default=100, help="how many crashes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # clients say that their server is gone
    started = time.monotonic()
    outcome = run(options.count, options.seed, lambda line: print(line, flush=True))
    print(report(outcome, time.monotonic() - started))
    return 0 if outcome.is_good() else 1


if __name__ == "__main__":
    sys.exit(main())
