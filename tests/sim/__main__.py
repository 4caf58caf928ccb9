"""Run seeds and cuts: for so many crashes, for so long, or one of them again."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import count, islice

from tests.sim.run import Outcome, run_seed
from tests.sim.steps import Cut, Job, every_cut, passage, run_job

SHOWN = ("crashes", "acknowledged", "local", "shared", "object", "faults", "promoted", "evictions", "verified", "calls")
FAILURES_MAX = 3
TOLD_EVERY_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--crashes", type=int, default=0, help="stop after so many simulated crashes")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--cloud", action="store_true", help="every seed has shared tiers beyond its node, not a few")
    parser.add_argument("--haste", action="store_true", help="clients give calls up in the middle")
    parser.add_argument("--cuts", action="store_true", help="first the fixed scenario, cut at every step of the disk")
    parser.add_argument("--seed", type=int, help="run this seed alone, and print every line")
    parser.add_argument("--cut", type=Cut.parse, metavar="STEP[p][:STEP]", help="run this cut alone; p: a power cut")
    options = parser.parse_args()
    if options.seed is not None:
        return _told(run_seed(options.seed, echo=True, is_cloudy=options.cloud, is_hasty=options.haste))
    if options.cut is not None:
        return _told(passage(options.cut, echo=True))
    if not (options.crashes or options.seconds or options.cuts):
        parser.error("say when to stop: --crashes, --seconds, or --cuts alone")
    return _run_many(options)


def _told(outcome: Outcome) -> int:
    print(outcome.told() if outcome.failure else f"{outcome.name} holds: trace {outcome.digest}")
    if outcome.failure:
        raise outcome.failure
    return 0


def _jobs(options: argparse.Namespace) -> Iterator[Job]:
    if options.cuts:
        yield from every_cut()
    if options.crashes or options.seconds:
        yield from count(options.first_seed)


def _run_many(options: argparse.Namespace) -> int:
    started = told = time.monotonic()
    totals: Counter[str] = Counter()
    failed = 0
    jobs: Iterator[Job] = _jobs(options)
    running: dict[Future[tuple[str, Counter[str]]], Job] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        while True:
            now = time.monotonic()
            is_late = options.seconds and now - started >= options.seconds
            if is_late or failed >= FAILURES_MAX or (options.crashes and totals["crashes"] >= options.crashes):
                jobs = iter(())
            for job in islice(jobs, 4 * options.jobs - len(running)):
                running[pool.submit(run_job, job, is_cloudy=options.cloud, is_hasty=options.haste)] = job
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            if any(isinstance(each.exception(), BrokenProcessPool) for each in done):
                print(f"one of these does not end, and where it is stands above: {list(running.values())}")
                return 1
            for each in done:
                del running[each]
                words, counts = each.result()
                totals += counts
                totals["runs"] += 1
                failed += bool(words)
                if words:
                    print(words, flush=True)
            if now - told >= TOLD_EVERY_S:
                told = now
                print(_line(totals, now - started), flush=True)
    print(_line(totals, time.monotonic() - started))
    print(", ".join(f"{totals[name]:,} {name.replace('_', ' ')}" for name in sorted(totals)))
    print(f"{failed} FAILED" if failed else "every promise was kept")
    return 1 if failed else 0


def _line(totals: Counter[str], seconds: float) -> str:
    counts = ", ".join(f"{totals[name]:,} {name}" for name in SHOWN)
    return f"{seconds:7.1f} s  {totals['runs']:,} runs, {counts}"


if __name__ == "__main__":
    sys.exit(main())
