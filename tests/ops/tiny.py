"""``kvstore bench all --tiny`` of which half would be imports: each benchmark has a process of its own, and starts
sidecars and Python processes. Here these are forks of the benchmark's, which has what they import."""

from __future__ import annotations

import subprocess
from typing import Any

import torch  # noqa: F401 - for the benchmarks, which are forks of this process
from kvstore_ops.bench import alone
from kvstore_ops.cli import main
from kvstore_ops.sidecar import Sidecar

from tests.conftest import WARM
from tests.warm import commands  # noqa: F401 - for the sidecars

_run = alone._run


def run(*given: Any) -> None:
    """Run a benchmark, in its process."""
    WARM.begin_as_fork()
    subprocess.Popen = Sidecar.launch = WARM.popen  # type: ignore[misc]  # a function in the place of a class
    try:
        _run(*given)
    finally:
        WARM.close()


if __name__ == "__main__":
    alone._run = run
    main()
