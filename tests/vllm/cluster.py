"""Two nodes with one Redis and one S3 server between them, in the service's own environment: engines have another one,
which has no servers.

    python -m tests.vllm.cluster      prints {"a": address, "b": address}, then does what each line of its input says
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"


class Between:
    """The other end of such a process: ``a`` and ``b`` are the nodes' addresses."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.a, self.b = self._said()

    def _said(self) -> list[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the nodes are gone: see above"
        return list(json.loads(line))

    def have(self, what: str) -> list[str]:
        """Have it done: "spread" returns how many chunks Redis and S3 have once node a has sent all; "kill a"; "kill
        redis"."""
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        return self._said()


@contextmanager
def between() -> Iterator[Between]:
    """All of it, until the end of the block."""
    command = [str(PYTHON), "-m", "tests.vllm.cluster"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        try:
            yield Between(process)
        finally:
            process.stdin.close()


def main() -> None:
    """See above."""
    from kvstore_client import connect

    from tests.e2e.two_nodes import quiet, two_nodes

    with two_nodes() as cluster:
        print(json.dumps([cluster.a.socket_address, cluster.b.socket_address]), flush=True)
        for line in sys.stdin:
            found: list[str] = []
            match line.strip():
                case "spread":
                    with connect(cluster.a.socket_address) as client:
                        quiet(client)
                    found = [str(len(cluster.in_redis())), str(len(cluster.in_s3()))]
                case "kill a":
                    cluster.a.stop(kill=True)
                case "kill redis":
                    cluster.redis.kill()
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
