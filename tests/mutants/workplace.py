"""A copy of the tree that may be changed and tested, and thrown away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.warm import Warm

TEST_TIMEOUT_S = 60
"""For one test. A mutant that hangs costs that much."""
RUN_TIMEOUT_S = 240
"""For all of a mutant's tests, should a test not even end when its time is up."""
PACKAGES = (".", "clients", "kernels", "ops")
IMPORTED = (
    "numpy",
    "xxhash",
    "blake3",
    "lz4.frame",
    "grpc",
    "google.protobuf.message",
    "hypothesis",
    "pytest",
    "torch",
)
"""What most tests import, and no tree has: once for all runs."""
PLUGINS_LEFT_OUT = ("cacheprovider", "anyio", "xdist")
"""What takes time to load, hundreds of times, and is not needed."""
_OLD_S = 1_000_000_000
"""When mutants were written, by their files' dates: no compiled file is of that time, and none stays valid."""


@dataclass(frozen=True)
class Run:
    """How a run of pytest ended: its status (None: it was killed when its time was up), and what it printed."""

    status: int | None
    output: str

    def told(self, *words: str) -> list[tuple[str, str]]:
        """(test, reason) of the lines of pytest's summary that begin with one of ``words``."""
        rows = [line.partition(" ") for line in self.output.splitlines()]
        found = [rest.partition(" - ") for word, _, rest in rows if word in words]
        return [(test.strip(), reason) for test, _, reason in found]


class Workplace:
    """One copy. ``place`` holds it and whatever its tests leave behind."""

    def __init__(self, tree: Path, files: Sequence[str], place: Path, imported: Sequence[str] = IMPORTED) -> None:
        self._place = place
        self._written = 0
        self.root = place / "tree"
        self._warm = Warm(*imported, directory=place, environment=self._environment)
        for name in files:
            if (tree / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, self.root / name)
        (place / "tmp").mkdir()
        place.chmod(0o711)  # some tests act as another user, who has to get through

    @property
    def _environment(self) -> dict[str, str]:
        own = {
            "PYTHONPATH": os.pathsep.join(str(self.root / each) for each in PACKAGES),
            "TMPDIR": str(self._place / "tmp"),
            "OMP_NUM_THREADS": "1",
        }
        return {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE", "PYTEST"))} | own

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """The tree with one line weakened. Raises LookupError when it is not there."""
        path = self.root / mutant.file
        text = mutant.source(self.root)
        original, status = path.read_bytes(), path.stat()
        self._written += 1
        try:
            path.write_text(text, encoding="utf-8")
            os.utime(path, (_OLD_S + self._written,) * 2)
            yield
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    async def check(self) -> None:
        """Raises RuntimeError when Python would take the packages from elsewhere: no mutant would be noticed."""
        told = "import kvstore; raise SystemExit(kvstore.__file__)"
        (self.root / "conftest_of_trial.py").write_text(told, encoding="utf-8")
        run = await self._run(["-p", "conftest_of_trial"], TEST_TIMEOUT_S)
        (self.root / "conftest_of_trial.py").unlink()
        if not run.output.startswith(str(self.root)):
            raise RuntimeError(f"the copy's packages are not what Python imports there: {run.output}")

    async def test(self, tests: Sequence[str], *, limit_s: float, stop_at_first: bool) -> Run:
        """Run tests here."""
        without = [option for name in PLUGINS_LEFT_OUT for option in ("-p", f"no:{name}")]
        options = ["-rfEs", "--tb=no", *without, f"--timeout={TEST_TIMEOUT_S}"]
        return await self._run([*options, *(["-x"] if stop_at_first else []), *tests], limit_s)

    async def _run(self, arguments: Sequence[str], limit_s: float) -> Run:
        """Pytest, in a process that has imported what is not the tree's: imports were half of a mutant's time."""
        output = self._place / "output"
        with output.open("wb") as out:
            process = self._warm.popen(
                [sys.executable, "-m", "pytest", *arguments], cwd=self.root, env=self._environment, stdout=out,
                stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        ended = asyncio.ensure_future(asyncio.to_thread(process.wait))
        try:
            await asyncio.wait((ended,), timeout=limit_s)
            status = ended.result() if ended.done() else None
            return Run(status, "" if status is None else output.read_text(encoding="utf-8", errors="replace"))
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # sidecars, too, that a test left behind
            await ended

    def close(self) -> None:
        """Idempotent."""
        self._warm.close()


def known_files(tree: Path) -> list[str]:
    """What git knows of a tree, and what is new in it. Raises RuntimeError where it knows nothing."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=tree, check=False, capture_output=True, text=True)
    if listed.returncode:
        raise RuntimeError(f"mutants are tried in a copy of what git knows: {listed.stderr.strip()}")
    return sorted(filter(None, listed.stdout.split("\0")))
