"""A process that has imported what is not ours, and forks a child for each run of pytest: imports were half of a
mutant's time. It is run as a file, and imports nothing of a tree: a child takes that from the copy it works in.

Each line of its input is a run: JSON of ``directory``, ``environment``, ``arguments`` of pytest, and a file ``output``.
For each it says two lines: the child's process id, which is its group's, too; and how it ended (below 0: by a signal).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from typing import Any


def main() -> None:
    """Arguments: the modules to import."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(**json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(directory: str, environment: dict[str, str], arguments: list[str], output: str) -> None:
    """In the child: as ``python -m pytest`` would there. Ends the process."""
    os.setsid()
    os.chdir(directory)
    for path, flags, number in ((os.devnull, os.O_RDONLY, 0), (output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 1)):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.path[0:1] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["pytest", *arguments]
    pytest: Any = importlib.import_module("pytest")
    sys.exit(int(pytest.main(arguments)))


if __name__ == "__main__":
    main()
