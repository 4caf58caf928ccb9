"""A process that starts warm is what an ordinary one is, to itself and to the process that started it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.errors import Unavailable
from kvstore.spec import MissReason
from tests.server.raw import eventually
from tests.specs import small_spec, tokens_of
from tests.warm import Warm

SAYS = """
import json, os, resource, sys
print(json.dumps({
    "parent": os.getppid(), "arguments": sys.argv, "directory": os.getcwd(), "environment": dict(os.environ),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE), "open": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "umask": os.umask(0o077), "name": __name__, "path": sys.path[0], "input": sys.stdin.read(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "command": open("/proc/self/cmdline").read().split(chr(0))[1],
}))
print("and an error", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else starts warm, and at full scale nobody has said so."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    found = Warm("json", "resource")
    yield found
    found.close()


def said(
    popen: type[subprocess.Popen[Any]], place: Path, kind: str, what: str, *, leads: bool = False
) -> tuple[dict[str, Any], str, int]:
    environment = {**os.environ, "KVSTORE_OF_A_TEST": "é"}
    pipe = subprocess.PIPE
    with popen(
        [sys.executable, kind, what, "a", "b c"], cwd=place, env=environment, stdin=pipe, stdout=pipe, stderr=pipe,
        text=True, start_new_session=leads,
    ) as process:  # fmt: skip
        output, errors = process.communicate("some input", timeout=60)
    return json.loads(output), errors, process.returncode


@pytest.mark.parametrize(("kind", "leads"), [("-c", False), ("-m", True)])
def test_it_is_what_an_ordinary_one_is(warm: Warm, tmp_path: Path, kind: str, leads: bool) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    what = SAYS if kind == "-c" else "says"
    (ordinary, *ended), (own, *own_end) = (
        said(each, tmp_path, kind, what, leads=leads) for each in (subprocess.Popen, warm.popen)
    )
    assert own.pop("command").endswith("template.py"), "it was no fork: the test would show nothing"
    assert ordinary.pop("command") == kind
    assert own == ordinary
    assert own_end == ended == ["and an error\n", 3]
    assert own["parent"] == os.getpid()
    assert own["leads"] == [leads, leads]


def test_limits_and_a_mask_that_changed_are_its_own(warm: Warm, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 10, hard))
    mask = os.umask(0o027)
    try:
        found, *_ = said(warm.popen, tmp_path, "-c", SAYS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.umask(mask)
    assert (found["files"], found["umask"]) == ([soft - 10, hard], 0o027)


def test_it_can_be_killed_and_waited_for(warm: Warm) -> None:
    with warm.popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert process.poll() is None
        process.kill()
        assert process.wait(20) == -signal.SIGKILL


def test_one_whose_imports_would_differ_is_an_ordinary_one(warm: Warm) -> None:
    own = "import sys; print('/template.py' in open('/proc/self/cmdline').read().split(chr(0))[1], sys.flags.optimize)"
    command = [sys.executable, "-c", own]
    assert warm.run(command, timeout=60).stdout == "True 0\n"
    assert warm.run(command, timeout=60, env={**os.environ, "PYTHONOPTIMIZE": "1"}).stdout == "False 1\n"
    assert warm.run([sys.executable, "-O", "-c", own], timeout=60).stdout == "False 1\n"
    assert warm.run(command, timeout=60, process_group=0).stdout == "False 0\n"


def test_without_its_template_it_is_said(warm: Warm) -> None:
    own = Warm("json")
    assert own.run([sys.executable, "-c", "pass"], timeout=60).returncode == 0
    assert own._process is not None
    own._process.kill()
    with pytest.raises((RuntimeError, ConnectionError)):
        own.run([sys.executable, "-c", "pass"], timeout=60)
    own.close()


ENDS = {
    "with a word": "import sys; sys.exit('a word')",
    "by an error": "raise ValueError('what is wrong')",
    "by an interrupt": "raise KeyboardInterrupt",
    "with a large status": "import sys; sys.exit(300)",
    "with nothing": "import sys; sys.exit()",
    "with what is called at the end": "import atexit; atexit.register(print, 'called')",
    "with an error at the end": "import atexit; atexit.register(lambda: 1 / 0)",
    "with a thread": "import threading; threading.Timer(0.2, print, ['waited']).start()",
    "with a line that was not ended": "print('some', end='')",
    "with a closed stream": "import sys; sys.stdout.close()",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_it_ends_as_an_ordinary_one_does(warm: Warm, code: str) -> None:
    command = [sys.executable, "-c", code]
    ordinary = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    own = warm.run(command, timeout=60)
    assert (own.returncode, own.stdout) == (ordinary.returncode, ordinary.stdout)
    assert own.stderr.splitlines()[-1:] == ordinary.stderr.splitlines()[-1:]


def test_a_sidecars_remote_plane_starts_warm_and_again_as_an_ordinary_process() -> None:
    def doors() -> list[tuple[int, list[str]]]:
        found = []
        for child in psutil.Process(running.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # one that was killed goes when it likes
                if child.pid not in running.mover_pids():
                    found.append((child.pid, child.cmdline()[1:2]))
        return found

    with Sidecar("--capacity", "16 MiB", plane="remote") as running:
        ((pid, (started_as,)),) = doors()
        assert started_as.endswith("template.py"), "it took a second of imports"
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: [name for _, name in doors()] == [["-m"]])
        eventually(lambda: is_served(running.address))


def is_served(address: str) -> bool:
    with contextlib.suppress(Unavailable), connect(address, token=TOKEN) as client:
        return client.lookup(small_spec(), tokens_of(64)).chunks[0].reason is MissReason.COLD
    return False
