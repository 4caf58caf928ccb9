"""Byte movers in processes of their own: what crosses, what does not, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.descriptors import open_files
from tests.seams.mover_jobs import WAIT_S, until
from tests.seams.mover_scenarios import SCENARIOS
from tests.warm import Warm


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Half a second of each scenario would be imports."""
    found = Warm("tests.seams.mover_scenarios")
    yield found
    found.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_movers(warm: Warm, scenario: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.seams.mover_scenarios", scenario.__name__, str(tmp_path)]
    done = warm.run(command, timeout=60)
    assert done.returncode == 0, done.stderr


def is_running(pid: int) -> bool:
    """Return True when a process is there and not dead already, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def has_only_its_own(pid: int) -> bool:
    """Not the other movers' sockets, nor the output of the process that it is a fork of."""
    sockets = [name for name in open_files(pid) if name.startswith("socket:")]
    return len(sockets) == 1 and os.readlink(f"/proc/{pid}/fd/1") == os.devnull


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_movers_end_with_their_process(how: signal.Signals) -> None:
    script = (
        "from kvstore.seams import MoverProcesses; import time; movers = MoverProcesses(2);"
        "print(*movers.pids, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = list(map(int, process.stdout.readline().split()))
        assert all(map(is_running, pids))
        for pid in pids:
            until(lambda pid=pid: has_only_its_own(pid))  # type: ignore[misc]
            os.kill(pid, signal.SIGTERM)  # theirs is to wait for their process
        assert all(map(is_running, pids))
        os.kill(pids[0], signal.SIGSTOP)  # one that hears nothing, as where a device holds it
        process.send_signal(how)
        assert process.stdout.read() == ""  # a mover would keep its output open
        process.wait(WAIT_S)
    for pid in pids:
        until(lambda pid=pid: not is_running(pid))  # type: ignore[misc]


WITHOUT_THREADS = """
import asyncio, os, resource
from kvstore.seams import MoverProcesses, SystemMemory

async def scenario():
    movers = MoverProcesses(1)
    (pid,) = movers.pids
    memory = SystemMemory(movers).read_only_to_others("memory", 4096)  # the mover has started when it is there
    room = int(open(f"/proc/{pid}/statm").read().split()[0]) * resource.getpagesize() + (1 << 20)
    resource.prlimit(pid, resource.RLIMIT_AS, (room, room))  # a thread's stack takes more
    lane = movers.lane("lane", 1)
    os.waitpid(pid, 0)

asyncio.run(scenario())
"""


def test_a_mover_that_may_start_no_thread_names_the_limits() -> None:
    command = [sys.executable, "-c", WITHOUT_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert "can't start new thread: allow this process more threads (ulimit -u" in done.stderr
    assert "Traceback" not in done.stderr
