"""One part in a process of its own. It ends by itself, or is ended, with all that it has started, at its limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore_ops.bench.origin import ROOT

TAIL_LINES = 60
GRACE_S = 3.0
"""Seconds that a part has to end by itself once it was asked to."""


@dataclass(kw_only=True)
class Outcome:
    """The end of a part. ``state``: done, failed, or cut. ``result``: a benchmark's, or the counts of tests.
    ``tail``: the end of its output."""

    name: str
    state: str
    seconds: float
    limit_s: float
    result: dict[str, Any] = field(default_factory=dict)
    tail: str = ""


def outcome_of(name: str, command: Sequence[str], limit_s: float, junit: Path | None = None) -> Outcome:
    """Run a command until it ends, for ``limit_s`` at most. ``junit``: where it writes what its tests did; without it
    the result is the last line of its output that is JSON. Never raises for what the command does."""
    started_s = time.monotonic()
    with tempfile.TemporaryFile("w+b") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    result = _counts(junit) if junit is not None else _last_json(lines)
    state = "cut" if status is None else "failed" if status or not result else "done"
    seconds = round(time.monotonic() - started_s, 1)
    tail = "\n".join(lines[-TAIL_LINES:])
    return Outcome(name=name, state=state, seconds=seconds, limit_s=round(limit_s, 1), result=result, tail=tail)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and whatever is left of its processes."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)


def _last_json(lines: Sequence[str]) -> dict[str, Any]:
    for line in reversed(lines):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
    return {}


def _counts(path: Path) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, and the names of those that failed; {} where none ran."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))  # noqa: S314 - our own tests wrote it
    except (OSError, ElementTree.ParseError):
        return {}
    wrong = [each for each in cases if each.find("failure") is not None or each.find("error") is not None]
    skipped = [each for each in cases if each.find("skipped") is not None]
    return {
        "passed": len(cases) - len(wrong) - len(skipped),
        "failed": len(wrong),
        "skipped": len(skipped),
        "failures": [f"{each.get('classname')}::{each.get('name')}" for each in wrong],
        "whys": sorted(
            {str(found.get("message"))[:200] for each in skipped if (found := each.find("skipped")) is not None}
        ),
    }
