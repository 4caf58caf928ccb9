"""A sidecar as an ordinary user has it: few open files to be had, and none of the rights that root has besides."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore_ops.sidecar import Sidecar

SCRIPT = """
import ctypes, os, resource, sys
for right in range(64):  # who has none to lose is told so, and goes on
    ctypes.CDLL(None).prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
os.execv(sys.executable, [sys.executable, "-m", "kvstore_ops.cli", "serve", *sys.argv[3:]])
"""


@contextmanager
def confined(soft: int, hard: int, *arguments: str, nvme: str = "0", **settings: str) -> Iterator[tuple[Sidecar, str]]:
    """A sidecar with these limits on open files, and its first line; empty when it does not start."""
    own = Sidecar()
    command = [sys.executable, "-c", SCRIPT, str(soft), str(hard), "--state-directory", str(own.directory)]
    command += ["--socket-directory", str(own.directory / "run"), "--nvme", nvme, *arguments]
    with (own.directory / "log").open("a") as log:
        own.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **settings}
        )
    try:
        assert own.process.stdout is not None
        assert select.select([own.process.stdout], [], [], 60.0)[0], "it says nothing"
        yield own, own.process.stdout.readline()
    finally:
        own.stop()


def log_of(own: Sidecar) -> str:
    return (own.directory / "log").read_text()
