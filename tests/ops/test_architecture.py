"""What docs/architecture.md names is there, each room has its line, and links of all pages lead to a file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from kvstore_ops.lint import LAYERS

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
TOPS = "kvstore|clients|kernels|ops|proto|tests|docs"
PLACE = re.compile(rf"(?<![\w/.])((?:{TOPS})/[\w./-]*\w/?)(?::([A-Za-z_][\w.]*\w))?")
"""A path, and after a colon what is defined there."""
PLACES = sorted({(path, name) for path, name in PLACE.findall(PAGE) if path != "kvstore/tiers/NAME"})
PATHS = sorted({path for path, _ in PLACES})
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def names_of(body: list[ast.stmt], before: str = "") -> set[str]:
    """What statements define: functions, classes and what is in these, variables."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(before + node.name)
            if isinstance(node, ast.ClassDef):
                found |= names_of(node.body, f"{before}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {before + each.id for each in targets if isinstance(each, ast.Name)}
    return found


@pytest.mark.parametrize("path", PATHS)
def test_what_the_page_names_is_there(path: str) -> None:
    place = ROOT / path
    assert place.exists()
    named = {name for each, name in PLACES if each == path and name}
    assert not named or named <= names_of(ast.parse(place.read_text()).body)


def test_the_page_names_places() -> None:
    assert len([name for _, name in PLACES if name]) > 40


def test_every_room_has_its_line_and_its_layer() -> None:
    said = {
        path.removeprefix("kvstore/").removesuffix(".py"): int(layer)
        for layer, line in re.findall(r"^\| (\d+) \|(.*)", PAGE, re.MULTILINE)
        for path, _ in PLACE.findall(line)
    }
    assert said == {room: number for number, rooms in enumerate(LAYERS, 1) for room in rooms}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []
