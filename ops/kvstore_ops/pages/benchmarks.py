"""docs/benchmarks.md, and the figures of the README, from docs/benchmarks.json.

The file has figures that were entered by hand, each with its commit, day and machine, and results that
``kvstore bench --json`` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequest

RESULTS = "docs/benchmarks.json"
HEAD = """\
# Benchmarks

<!-- Made by `python -m kvstore_ops.pages` from docs/benchmarks.json; change that. -->

`kvstore bench list` names the benchmarks; `kvstore bench NAME --quick` runs one in less than 45 s, without `--quick` in
full, and `make bench` all that need no other product, quick. Each measures a figure and, in the same run, the limit
that it is held against. The last line is JSON; the line before says whether the target was met, and has each figure
that decides it behind its bound. `kvstore bench NAME --quick --json FILE` also writes it to a file, with
commit, day and machine, and `python -m kvstore_ops.pages FILE` takes that in here.

`vllm-cold` needs vLLM (`make setup-vllm`) and runs as `.venv-vllm/bin/kvstore bench vllm-cold`. `peers` runs beside
LMCache's daemon and Mooncake's store without a GPU. Each has an environment of its own, in the directory that
`KVSTORE_BENCH_LMCACHE` (1.9 GB) or `KVSTORE_BENCH_MOONCAKE` names; pip makes one that is missing, and without one the
table says so. Mooncake needs Debian's libibverbs1, librdmacm1, libnl-3-200 and libnl-route-3-200, installed or in
`LD_LIBRARY_PATH`. `peers-redis` and `peers-s3` move chunks to one Redis and one bucket beside LMCache's clients
(`KVSTORE_BENCH_LMCACHE`).

`make gpu` is for a machine with a GPU: it runs the tests that need one and the benchmarks `gpu-*`, which `all` leaves
out where there is none, and ends within nine minutes with one table and `kvstore-gpu.json`. `python -m kvstore_ops.gpu
--help` names its parts, its options and its exit status. It takes the Python whose torch has CUDA, .venv's or
`PYTHON`'s; without a GPU it says what is missing, and what that leaves untested. What it measured stands in
[gpu.md](gpu.md).

GB are 10^9 bytes. Machines like these are shared with others, so ratios hold better than rates. Figures of different
commits stand side by side below: each row says its own, and is of a quick run unless it says "in full". No speed and
quality belong to one claim unless they are of one setting; how well reuse answers is in [quality.md](quality.md).
"""
BEGIN, END = "<!-- figures -->\n", "<!-- end -->\n"


def read(root: Path) -> dict[str, Any]:
    """Read all results."""
    found: dict[str, Any] = json.loads((root / RESULTS).read_text(encoding="utf-8"))
    return found


def take_in(root: Path, file: Path) -> None:
    """Add a file of ``kvstore bench --json``. It replaces older results of the same benchmarks, scale and machine.
    Raises InvalidRequest for another file."""
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        names = {each["name"] for each in run["results"]}
        same = (run["scale"], run["machine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{file}: not what kvstore bench --json writes ({error!r})") from error
    found = read(root)
    for old in found["printed"]:
        if (old["scale"], old["machine"]) == same:
            old["results"] = [each for each in old["results"] if each["name"] not in names]
    found["printed"] = [*(old for old in found["printed"] if old["results"]), run]
    (root / RESULTS).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def render(found: dict[str, Any]) -> str:
    """Return the whole page."""
    groups = [_stated(group) for group in found["stated"]]
    machines = "".join(f"- *{name}*: {what}\n" for name, what in found["machines"].items())
    return HEAD + f"\nMachines:\n\n{machines}" + "".join(groups) + "".join(map(_printed, found["printed"]))


def headlines(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that the README shows."""
    return [row for group in found["stated"] for row in group["rows"] if row.get("headline")]


def with_headlines(readme: str, found: dict[str, Any]) -> str:
    """Return the README with the figures of the results."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, BEGIN
    assert end, END
    rows = headlines(found)
    where = f"`kvstore bench NAME --quick` at commit {rows[0]['commit']} on {found['machines'][rows[0]['machine']]}:"
    table = _table(
        ("benchmark", "figure", "beside it"),
        ((f"`{row['benchmark']}`: {row['what']}", row["figure"], row["beside"]) for row in rows),
    )
    return f"{before}{BEGIN}{where}\n\n{table}{END}{after}"


def _stated(group: dict[str, Any]) -> str:
    rows = (
        (
            f"`{row['benchmark']}`{_scale(row)}",
            row["what"],
            row["figure"],
            row["beside"],
            f"{row['commit']}, {row['date']}",
        )
        for row in group["rows"]
    )
    notes = "".join(f"\n{note}\n" for note in group["notes"])
    return f"\n## {group['title']}\n\n{_table(('benchmark', 'what', 'figure', 'beside it', 'commit'), rows)}{notes}"


def _scale(row: dict[str, Any]) -> str:
    return ", in full" if row["scale"] == "full" else ""


def _printed(run: dict[str, Any]) -> str:
    """Return the table of one run of ``kvstore bench``."""
    rows = (
        (
            f"`{each['name']}`", f"{each['value']:.4g} {each['unit']}", f"{each['ratio']:.3g}",
            " to ".join(f"{end:.3g}" for end in each["spread"]), each["target"], "yes" if each["met"] else "no",
            str(each["runs"]),
        )
        for each in run["results"]
    )  # fmt: skip
    columns = ("benchmark", "value", "ratio to its limit", "quartiles", "target", "met", "runs")
    title = f"Printed at commit {run['commit']}, {run['date']}, {run['scale']}"
    load = f"{run['machine']}; {run['load_before']:g} processes wanted a core before."
    return f"\n## {title}\n\n{load}\n\n{_table(columns, rows)}"


def _table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [_line(columns), "|" + "---|" * len(columns), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
