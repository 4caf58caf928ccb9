"""What the documentation says: made pages are current, links and commands exist, and each example is run, and once."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from kvstore_ops.cli import app
from kvstore_ops.pages import benchmarks, configuration, page

from kvstore.config import load
from kvstore.errors import InvalidRequest
from tests.conftest import ROOT
from tests.ops.test_guides import SAID, WORDS

PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = {
    ("README.md", "bash"): "installs into the repository; its sidecar is started by test_guides.py",
    ("bytes.md", "bash"): "takes xllamacpp and a model",
    ("cluster.md", "bash"): "its last sidecar is started as written by test_guides.py",
    ("configuration.md", "bash"): "is read below",
    ("events.md", "bash"): "its last sidecar is started as written by test_guides.py",
    ("sglang.md", "sh"): "takes SGLang, which takes CUDA",
    ("vllm.md", "bash"): "takes vLLM, in an environment of its own",
}
"""Examples that no test runs as they stand."""
BY_OTHERS = {("operations.md", "bash"), ("upgrade.md", "bash"), ("operations.md", "python")}
"""Run by tests/ops/test_operations.py, tests/ops/test_boundaries.py and tests/telemetry/test_tracing.py."""
WORDS_MAX = 900


def blocks(kind: str = r"\w+") -> Iterator[tuple[str, str, str]]:
    """Page, kind and text of each example."""
    for name, path in PAGES.items():
        for found, text in BLOCK.findall(path.read_text()):
            if re.fullmatch(kind, found):
                yield name, found, text


# ------------------------------------------------------------ made pages


@pytest.mark.parametrize("path", page.MADE)
def test_a_made_page_is_current(path: str) -> None:
    text = (ROOT / path).read_text()
    assert page.MADE[path](text) == text, "run python -m kvstore_ops.pages"


def test_every_setting_has_a_row_with_a_meaning() -> None:
    rows = [entry for section in configuration.sections() for entry in configuration.entries(*section)]
    tenants = {entry.name for entry in rows if entry.name.startswith("tenants.")}
    assert {entry.name for entry in rows} - tenants == set(load().origins)
    assert all(entry.default and entry.meaning.endswith(".") for entry in rows)


def test_the_three_ways_to_set_something_are_one() -> None:
    text = PAGES["configuration.md"].read_text()
    toml = tomllib.loads(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0])
    shell = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[0]
    environment = {
        name: shlex.split(value)[0] for name, value in re.findall(r"^export (\w+)=(.*)$", shell, re.MULTILINE)
    }
    settings = load(None, environment).settings
    file = (toml["arena"]["capacity_bytes"], toml["tiers"]["nvme"]["directory"])
    assert shlex.split(shell)[-4:] == ["--capacity", file[0], "--nvme-directory", file[1]]
    assert (settings.arena.capacity_bytes, str(settings.tiers.nvme.directory)) == (8 << 30, file[1])


def test_the_readmes_figures_are_of_one_commit_and_machine() -> None:
    rows = benchmarks.headlines(benchmarks.read(ROOT))
    assert len(rows) == 6
    assert len({(row["commit"], row["machine"], row["scale"]) for row in rows}) == 1


def test_results_take_the_place_of_older_ones(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "benchmarks.json").write_text('{"machines": {}, "stated": [], "printed": []}')
    result = {"name": "fetch", "value": 1.0, "unit": "B/s", "ratio": 0.5, "spread": [0.4, 0.6], "target": ">= 1",
              "met": False, "runs": 3}  # fmt: skip
    run = {"commit": "abc", "date": "2026-01-01", "scale": "quick", "machine": "m", "load_before": 0.1}
    for commit, names in (("one", ["fetch", "store"]), ("two", ["fetch"])):
        results = [{**result, "name": name} for name in names]
        (tmp_path / "new.json").write_text(json.dumps({**run, "commit": commit, "results": results}))
        benchmarks.take_in(tmp_path, tmp_path / "new.json")
    printed = benchmarks.read(tmp_path)["printed"]
    assert [(each["commit"], [row["name"] for row in each["results"]]) for each in printed] == [
        ("one", ["store"]),
        ("two", ["fetch"]),
    ]
    assert "| `fetch` | 1 B/s | 0.5 | 0.4 to 0.6 | >= 1 | no | 3 |" in benchmarks.render(benchmarks.read(tmp_path))
    with pytest.raises(InvalidRequest, match="bench --json"):
        benchmarks.take_in(tmp_path, tmp_path / "docs" / "benchmarks.json")


# ------------------------------------------------------------ what pages name


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].read_text().split()) < WORDS_MAX


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = BLOCK.sub("", path.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_a_heading(name: str) -> None:
    for path, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", PAGES[name].read_text()):
        target = PAGES[name].parent / path if path else PAGES[name]
        assert anchor in anchors(target), f"{path}#{anchor}"


def test_every_page_is_linked_from_the_readme_or_another() -> None:
    linked = {Path(link).name for path in PAGES.values() for link in re.findall(r"\]\(([^)#\s]+)", path.read_text())}
    assert set(PAGES) - linked <= {"README.md"}


def said_commands() -> list[str]:
    """Every ``kvstore ...`` and ``make ...`` of the pages."""
    found: set[str] = set()
    for path in PAGES.values():
        text = path.read_text()
        lines = [line for _, block in BLOCK.findall(text) for line in block.splitlines()]
        lines += re.findall(r"^    (\S.*)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
        found |= {match[1] for line in lines if (match := re.match(r"\s*(?:\S*/)?((?:kvstore|make) [a-z].*)", line))}
    return sorted(found)


def test_commands_and_their_options_exist() -> None:
    command = typer.main.get_group(app)
    context = command.make_context("kvstore", ["version"])
    commands = {name: command.get_command(context, name) for name in command.list_commands(context)}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for said in said_commands():
        tool, name, *rest = said.split("#")[0].split()
        if tool == "make":
            assert name in targets, said
            continue
        assert name in commands, said
        known = {option for parameter in commands[name].params for option in parameter.opts + parameter.secondary_opts}
        assert {word for word in rest if re.fullmatch(r"--[a-z-]+", word)} <= known, said


# ------------------------------------------------------------ examples


def test_every_example_is_run() -> None:
    run = {(Path(name).name, "python") for name in SAID} | {(name, "bash") for name in WORDS}
    shell_or_python = {(name, kind) for name, kind, _ in blocks("python|bash|sh")}
    assert shell_or_python == run | set(NOT_RUN) | BY_OTHERS
    assert not run & set(NOT_RUN)


def test_settings_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    for _, _, text in blocks("toml"):
        file.write_text(text)
        load(file)


def test_each_example_appears_once() -> None:
    windows: Counter[str] = Counter()
    for _, _, text in blocks("python"):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        windows.update({"\n".join(lines[at : at + 6]) for at in range(len(lines) - 5)})
    assert [window for window, count in windows.items() if count > 1] == []
