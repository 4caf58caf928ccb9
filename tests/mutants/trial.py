"""Mutants on trial: every one is noticed by a test that its list names, or it survived."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.workplace import IMPORTED, RUN_TIMEOUT_S, Run, Workplace, known_files

BASELINE_TIMEOUT_S = 1800
_TIME_IS_UP = "Timeout (>"
"""In what pytest-timeout says of a test that it ends."""


class Verdict(Enum):
    NOTICED = "noticed"
    SURVIVED = "SURVIVED"
    HANGS = "HANGS"
    """It waits for ever, and its list does not say that this is how tests notice it."""
    SKIPPED = "skipped"
    """Its tests are skipped on this machine: they need root, or hardware."""
    WRONG = "WRONG"
    """The list's mistake: the line is not there, the tests do not pass without it, or nothing can be imported."""


@dataclass(frozen=True)
class Outcome:
    """``by``: the test that noticed, or what is wrong."""

    mutant: Mutant
    verdict: Verdict
    by: str
    seconds: float


async def try_all(
    tree: Path, mutants: Sequence[Mutant], jobs: int, tell: Callable[[str], None], imported: Sequence[str] = IMPORTED
) -> list[Outcome]:  # fmt: skip
    """Each mutant's outcome, in the list's order. Whatever ends this, no copy and no process stays. ``imported``: what
    the runs of pytest need not import each for itself."""
    files = known_files(tree)
    with ExitStack() as stack:
        places = [
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True))
            for _ in range(jobs)
        ]
        workplaces = [Workplace(tree, files, Path(place), imported) for place in places]
        for each in workplaces:
            stack.callback(each.close)
        await workplaces[0].check()
        failing = await _failing(workplaces, mutants, tell)
        found: dict[str, Outcome] = {}
        waiting = iter(mutants)

        async def work(workplace: Workplace) -> None:
            for mutant in waiting:
                outcome = await _outcome(workplace, mutant, failing)
                found[mutant.name] = outcome
                tell(f"{len(found):3d}/{len(mutants)} {line(outcome)}")

        async with asyncio.TaskGroup() as group:
            for workplace in workplaces:
                group.create_task(work(workplace))
    return [found[mutant.name] for mutant in mutants]


def line(outcome: Outcome) -> str:
    """One row of the table."""
    mutant = outcome.mutant
    return f"{outcome.verdict.value:8} {mutant.name:40} {mutant.file:44} {outcome.seconds:5.1f} s  {outcome.by}"


async def _failing(
    workplaces: Sequence[Workplace], mutants: Sequence[Mutant], tell: Callable[[str], None]
) -> dict[str, str]:
    """Run every named test on the code as it is, once. Returns those that cannot notice anything, and why."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    tell(f"{len(tests)} tests on the code as it is")
    modules = sorted({test.partition("::")[0] for test in tests})
    shares = [{*modules[number :: len(workplaces)]} for number in range(len(workplaces))]
    runs = await asyncio.gather(
        *(_baseline(each, [test for test in tests if test.partition("::")[0] in share])
          for each, share in zip(workplaces, shares, strict=True))
    )  # fmt: skip
    failing = {test: reason for found in runs for test, reason in found.items()}
    for test, reason in failing.items():
        tell(f"does not pass: {test} {reason}")
    return failing


async def _baseline(workplace: Workplace, tests: Sequence[str]) -> dict[str, str]:
    if not tests:
        return {}
    run = await workplace.test(tests, limit_s=BASELINE_TIMEOUT_S, stop_at_first=False)
    missing = {test: "is not there" for test in tests if f"not found: {workplace.root / test}\n" in run.output}
    if missing:  # then pytest ran none
        return missing | await _baseline(workplace, [test for test in tests if test not in missing])
    failing = dict(run.told("FAILED", "ERROR"))
    if run.status not in (0, 1) or (run.status and not failing):
        why = run.output[-2000:] if run.status is not None else "their time was up"
        raise RuntimeError(f"the named tests cannot be run: {why}")
    return failing


async def _outcome(workplace: Workplace, mutant: Mutant, failing: dict[str, str]) -> Outcome:
    started = time.monotonic()
    verdict, by = await _verdict(workplace, mutant, failing)
    return Outcome(mutant, verdict, by, time.monotonic() - started)


async def _verdict(workplace: Workplace, mutant: Mutant, failing: dict[str, str]) -> tuple[Verdict, str]:
    bad = [test for test in failing if any(test == each or test.startswith(f"{each}[") for each in mutant.tests)]
    if bad:
        return Verdict.WRONG, f"does not pass without it: {bad[0]}"
    try:
        with workplace.mutated(mutant):
            run = await workplace.test(mutant.tests, limit_s=RUN_TIMEOUT_S, stop_at_first=True)
    except LookupError as error:
        return Verdict.WRONG, str(error)
    return judged(run, mutant)


def judged(run: Run, mutant: Mutant) -> tuple[Verdict, str]:
    """What a run of a mutant's tests says of it."""
    if run.status == 0:
        return (
            (Verdict.SURVIVED, "nobody") if "passed" in run.output else (Verdict.SKIPPED, "its tests are skipped here")
        )
    failed = run.told("FAILED", "ERROR")
    if run.status is None or any(_TIME_IS_UP in reason for _, reason in failed):
        by = failed[0][0] if failed else mutant.tests[0]
        return (Verdict.NOTICED if mutant.hangs else Verdict.HANGS), by
    if run.status < 0:
        return Verdict.NOTICED, f"{mutant.tests[0]} (it ended by signal {-run.status})"
    if run.status != 1 or not failed:
        return Verdict.WRONG, f"its tests cannot be run: {run.output[-300:]}"
    return Verdict.NOTICED, failed[0][0]
