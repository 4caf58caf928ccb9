"""python -m tests.mutants --jobs 2"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.lists import MUTANTS
from tests.mutants.trial import Outcome, Verdict, line, try_all

ROOT = Path(__file__).resolve().parents[2]


def summary(outcomes: Sequence[Outcome]) -> str:
    """The last line."""
    counts = {verdict: sum(each.verdict is verdict for each in outcomes) for verdict in Verdict}
    text = f"{len(outcomes)} mutants, {counts[Verdict.NOTICED]} noticed, {counts[Verdict.SURVIVED]} survived"
    if counts[Verdict.SKIPPED]:
        text += f", {counts[Verdict.SKIPPED]} not tried here"
    if counts[Verdict.HANGS]:
        text += f", {counts[Verdict.HANGS]} hang"
    return text + (f", {counts[Verdict.WRONG]} wrong in the list" if counts[Verdict.WRONG] else "")


def as_json(outcomes: Sequence[Outcome]) -> str:
    """The table for machines."""
    rows = [
        {"name": each.mutant.name, "file": each.mutant.file, "line": each.mutant.line, "mutated": each.mutant.mutated,
         "why": each.mutant.why, "verdict": each.verdict.name, "by": each.by, "seconds": round(each.seconds, 1)}
        for each in outcomes
    ]  # fmt: skip
    return json.dumps(rows, indent=1)


async def _run(names: Sequence[str], jobs: int) -> list[Outcome]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    return await try_all(ROOT, chosen, jobs, lambda text: print(text, flush=True))


def main() -> int:
    """0 when every mutant that could be tried was noticed, 2 when none could be."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Weaken lines, and see who notices.")
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="this mutant; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants are tried at once")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the table there, too")
    options = parser.parse_args()
    unknown = set(options.only) - {mutant.name for mutant in MUTANTS}
    if unknown or options.jobs < 1:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}" if unknown else "--jobs must be 1 or more")
    try:
        outcomes = asyncio.run(_run(options.only, options.jobs))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted; the copies are gone", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(as_json(outcomes), encoding="utf-8")
    print("\n" + "\n".join(line(each) for each in outcomes) + "\n\n" + summary(outcomes))
    return 0 if all(each.verdict in (Verdict.NOTICED, Verdict.SKIPPED) for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
