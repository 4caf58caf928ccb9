"""``kvstore bench all --tiny`` of which half would be imports: each benchmark has a process of its own, and a sidecar.
Here they start with what they import."""

from __future__ import annotations

import torch  # noqa: F401 - for the benchmarks, which are forks of this process
from kvstore_ops.cli import main
from kvstore_ops.sidecar import Sidecar

from tests.conftest import WARM

if __name__ == "__main__":
    Sidecar.launch = WARM.popen
    try:
        main()
    finally:
        WARM.close()
