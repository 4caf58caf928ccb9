"""The console entry point. It imports the commands within reach of an interrupt: importing them takes a while."""

from __future__ import annotations

import os
import sys


def enter() -> None:
    """Run the ``kvstore`` command. An interrupt ends it without a traceback, also while modules are imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it logs handshakes that fail, which our error tells
    try:
        from kvstore_ops.cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)  # as kvstore_ops.options.INTERRUPTED, whose module may not be there yet


if __name__ == "__main__":
    enter()
