"""A demo that is ended early leaves nothing behind: no directory, no sidecar, no engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("number", "at"), [(signal.SIGINT, "sidecar: pid"), (signal.SIGTERM, "cold: reading the documentation")]
)
def test_a_demo_that_is_ended_leaves_nothing(number: signal.Signals, at: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore_ops.cli", "demo"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if at in line:
                break
        assert list(tmp_path.iterdir())
        process.send_signal(number)  # to it alone: what it started does not hear of it
        _, complaints = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in complaints
    left = {each.name for each in tmp_path.iterdir() if not each.name.startswith("torchinductor_")}
    assert left == set()  # but for a directory that torch keeps for each user
    assert [command for command in running() if str(tmp_path) in command] == []


def running() -> list[str]:
    """The command lines of all processes."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(each.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
