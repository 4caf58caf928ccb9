"""The trial tells a mutant that tests notice from one that survives, and leaves the tree as it was."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from tests.mutants import workplace
from tests.mutants.__main__ import summary
from tests.mutants.mutant import Mutant
from tests.mutants.trial import Verdict, judged, try_all
from tests.mutants.workplace import Run

PRODUCT = """
import time
LIMIT = 3
def below(number):
    return number < LIMIT
def wait():
    time.sleep(0)
"""
TESTS = """
import kvstore
def test_below():
    assert kvstore.below(2) and not kvstore.below(4)
def test_wait():
    kvstore.wait()
def test_wrong():
    assert not kvstore.below(0)
"""


def mutant(name: str, line: str, mutated: str, test: str, *, hangs: bool = False) -> Mutant:
    return Mutant(name, "kvstore/__init__.py", line, mutated, "", (f"tests/test_product.py::{test}",), hangs)


EXPECTED = {
    mutant("killed", "number < LIMIT", "True", "test_below"): Verdict.NOTICED,
    mutant("lives", "number < LIMIT", "number <= LIMIT", "test_below"): Verdict.SURVIVED,
    mutant("waits", "time.sleep(0)", "time.sleep(60)", "test_wait"): Verdict.HANGS,
    mutant("gone", "number > LIMIT", "True", "test_below"): Verdict.WRONG,
    mutant("twice", "LIMIT", "5", "test_below"): Verdict.WRONG,
    mutant("fails-anyway", "number < LIMIT", "True", "test_wrong"): Verdict.WRONG,
}


@pytest.mark.parametrize(
    ("run", "hangs", "verdict"),
    [
        (Run(0, "1 passed"), False, Verdict.SURVIVED),
        (Run(0, "1 skipped"), False, Verdict.SKIPPED),
        (Run(1, "FAILED a::b - assert 1 == 2"), False, Verdict.NOTICED),
        (Run(1, "FAILED a::b - Failed: Timeout (>60.0s) from pytest-timeout."), False, Verdict.HANGS),
        (Run(1, "FAILED a::b - Failed: Timeout (>60.0s) from pytest-timeout."), True, Verdict.NOTICED),
        (Run(-7, "Fatal Python error: Bus error"), False, Verdict.NOTICED),
        (Run(None, ""), False, Verdict.HANGS),
        (Run(None, ""), True, Verdict.NOTICED),
        (Run(2, "ERROR a - NameError: x"), False, Verdict.WRONG),
        (Run(4, "ImportError while loading conftest"), False, Verdict.WRONG),
    ],
)
def test_how_a_run_is_judged(run: Run, hangs: bool, verdict: Verdict) -> None:
    assert judged(run, mutant("any", "a", "b", "test_below", hangs=hangs))[0] is verdict


def test_each_mutant_has_its_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workplace, "TEST_TIMEOUT_S", 2)
    files = {"kvstore/__init__.py": PRODUCT, "tests/test_product.py": TESTS}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    outcomes = asyncio.run(try_all(tmp_path, list(EXPECTED), 2, lambda line: None, ()))
    assert {each.mutant.name: each.verdict for each in outcomes} == {
        each.name: verdict for each, verdict in EXPECTED.items()
    }
    assert summary(outcomes) == "6 mutants, 1 noticed, 1 survived, 1 hang, 3 wrong in the list"
    assert {name: (tmp_path / name).read_text() for name in files} == files
