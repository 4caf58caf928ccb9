"""python -m tests.outage --seconds 20"""

from __future__ import annotations

import argparse
import sys

from tests.outage.campaign import run

BACK_S_MAX = 10.0


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    """0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.outage", description="Stop shared tiers, and look.")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each outage takes")
    options = parser.parse_args()
    outcome = run(options.seconds, options.seconds, BACK_S_MAX, _say, is_timed=True)
    print(outcome.report())
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
