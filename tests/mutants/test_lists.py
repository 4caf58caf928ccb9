"""The lists are true: what they name is there. Whether tests notice is for ``make mutants`` to say."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.lists import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


@cache
def names_in(path: str) -> frozenset[str]:
    """What a test module defines or imports at its top."""
    found: set[str] = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {each.name for each in node.names}
    return frozenset(found)


@pytest.mark.parametrize("path", sorted({mutant.file for mutant in MUTANTS}))
def test_mutants_of_a_file_name_lines_and_tests_that_are_there(path: str) -> None:
    for mutant in (each for each in MUTANTS if each.file == path):
        ast.parse(mutant.source(ROOT))
        assert mutant.mutated != mutant.line, mutant.name
        assert mutant.why, mutant.name
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            module, _, name = test.partition("::")
            assert name.partition("[")[0].partition("::")[0] in names_in(module), (mutant.name, test)


def test_names_are_used_once() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
