"""Run seeds: for so many of them, for so long, or one of them again."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from tests.sim.run import run_seed

SHOWN = ("crashes", "acknowledged", "local", "faults", "promoted", "evictions", "verified", "calls")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seeds", type=int, default=0, help="stop after so many")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long")
    parser.add_argument("--crashes", type=int, default=0, help="stop after so many simulated crashes")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run this one, and print every line")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.seed is not None:
        outcome = run_seed(options.seed, echo=True)
        print(outcome.told() if outcome.failure else f"seed {options.seed} holds: trace {outcome.digest}")
        if outcome.failure:
            raise outcome.failure
        return 0
    return _run_many(options)


def _run_many(options: argparse.Namespace) -> int:
    started = told = time.monotonic()
    totals: Counter[str] = Counter()
    seed, failed = options.first_seed, 0
    while True:
        outcome = run_seed(seed)
        totals += outcome.totals
        totals["runs"] += 1
        if outcome.failure is not None:
            failed += 1
            print(outcome.told(), flush=True)
        seed += 1
        now = time.monotonic()
        counts = [(options.seeds, totals["runs"]), (options.crashes, totals["crashes"])]
        limits = [options.seconds and now - started >= options.seconds, *(most and n >= most for most, n in counts)]
        if any(limits) or failed >= 3 or (not options.seconds and not any(most for most, _ in counts)):
            break
        if now - told >= 5.0:
            told = now
            print(_line(totals, now - started), flush=True)
    print(_line(totals, time.monotonic() - started))
    print({name: totals[name] for name in sorted(totals)})
    return 1 if failed else 0


def _line(totals: Counter[str], seconds: float) -> str:
    counts = ", ".join(f"{totals[name]:,} {name}" for name in SHOWN)
    return f"{seconds:7.1f} s  {totals['runs']:,} runs, {counts}"


if __name__ == "__main__":
    sys.exit(main())
