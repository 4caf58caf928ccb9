"""A demo that is ended early leaves nothing behind: no directory, no sidecar, no engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import IS_FULL

STEP = "cold: reading the documentation"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM] if IS_FULL else [signal.SIGTERM])
def test_a_demo_that_is_ended_leaves_nothing(number: signal.Signals) -> None:
    """Ended while it waits for an engine. A signal that comes in the midst of gRPC's own code may leave a lock taken,
    which the end then waits for."""
    with tempfile.TemporaryDirectory(prefix="demo-") as directory:  # a socket's path is short, and pytest's are not
        check_ended(number, Path(directory))


def check_ended(number: signal.Signals, place: Path) -> None:
    command = [sys.executable, "-m", "kvstore_ops.cli", "demo"]
    environment = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=place,
        preexec_fn=hear_interrupts,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if STEP in line:
                break
        assert list(place.iterdir())
        process.send_signal(number)  # to it alone: what it started does not hear of it
        _, complaints = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in complaints
    left = {each.name for each in place.iterdir() if not each.name.startswith("torchinductor_")}
    assert left == set()  # but for a directory that torch keeps for each user
    assert [command for command in running() if str(place) in command] == []


def hear_interrupts() -> None:
    """A shell that runs the tests in the background has them, and what they start, ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def running() -> list[str]:
    """The command lines of all processes."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(each.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
