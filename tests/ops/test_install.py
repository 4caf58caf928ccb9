"""A wheel that is built from the tree: all that the service reads at run time is in it, and its command starts.

It is installed beside the dependencies of this environment; `docs/upgrade.md` has the check in an empty one.
"""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import typer
from kvstore_copies import is_compiled
from kvstore_ops.cli import app
from kvstore_ops.commands import PANELS

from kvstore import __version__
from kvstore.server.web.site import FILES
from tests.conftest import ROOT
from tests.ops.command import run

READ = [
    *(f"kvstore/server/web/{name}" for name, _ in FILES.values()), "kvstore/py.typed", "kvstore/v1/cache_pb2.py",
    "kvstore_client/client.py", "kvstore_kernels/__init__.py", "kvstore_copies/batch.py",
    "kvstore_ops/testbed/seeds.toml", "kvstore_ops/testbed/weights/l6-s2/model.safetensors",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel was unpacked, as an installation does."""
    pytest.importorskip("setuptools", "77", reason="building takes setuptools 77")
    made = tmp_path_factory.mktemp("wheel")
    source, place = made / "source", made / "installed"
    source.mkdir()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("the tree is no git repository: what belongs to it is not known")
    for name in listed:
        if not name.startswith("tests/") and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(ROOT / name, source / name) if _is_same_device(source) else _copied(name, source)
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", build, str(made)]
    subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=100, check=True)
    (wheel,) = made.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(place)
    return place


def _is_same_device(place: Path) -> bool:
    return place.stat().st_dev == ROOT.stat().st_dev


def _copied(name: str, target: Path) -> None:
    (target / name).write_bytes((ROOT / name).read_bytes())


@pytest.mark.parametrize("name", READ)
def test_what_is_read_at_run_time_is_in_the_wheel(place: Path, name: str) -> None:
    assert (place / name).stat().st_size or name.endswith("py.typed")


@pytest.mark.skipif(not is_compiled(), reason="kvstore was installed without a C compiler")
def test_compiled_code_is_in_the_wheel(place: Path) -> None:
    assert list((place / "kvstore_copies").glob("_compiled*.so"))


def test_the_command_of_the_wheel_says_its_version(place: Path) -> None:
    program = "import kvstore, kvstore_ops.cli as c; print(kvstore.__file__); c.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"], cwd=place.parent, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(place)}, check=True,
    )  # fmt: skip
    file, version = done.stdout.splitlines()
    assert Path(file).is_relative_to(place)
    assert version == __version__
    assert list(place.glob(f"kvstore-{__version__}.dist-info/entry_points.txt"))


def commands() -> list[str]:
    """Of ``kvstore``, by name."""
    group = typer.main.get_command(app)
    return group.list_commands(None)


@pytest.mark.parametrize("name", commands())
def test_every_command_has_an_example(name: str) -> None:
    done = run(name, "--help")
    assert done.code == 0
    assert f"Example: kvstore {name}" in " ".join(done.out.split())


def test_the_help_shows_every_command_in_a_panel() -> None:
    told = run("--help").out
    assert all(panel in told for panel in PANELS)
    assert "─ Commands ─" not in told
    assert sorted(commands()) == sorted(name for names in PANELS.values() for name in names)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_says_its_steps_and_pip_its_progress_to_a_terminal_alone() -> None:
    command = ["make", "--dry-run", "--always-make", "setup"]
    in_log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert in_log.count("echo ") == 3
    assert "pip install --quiet" in in_log
    ours, terminal = pty.openpty()
    try:
        watched = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=terminal, text=True, timeout=60, check=True
        ).stdout
    finally:
        os.close(ours)
        os.close(terminal)
    assert watched.split() == in_log.replace("--quiet", "").split()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_names_every_target() -> None:
    command = ["make", "--no-print-directory", "help"]  # make itself may run the tests
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    (phony,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:")]
    assert {line.split()[0] for line in told.splitlines()} == set(phony.split()[1:])


def test_shells_can_complete() -> None:
    command = f"{sys.executable} -m kvstore_ops.cli --show-completion; exit $?"  # the shell stays, and is found by it
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert "complete" in shown.stdout
    assert run("--version").out.strip() == __version__
    assert run("version").out.strip() == __version__


@pytest.mark.parametrize(("arguments", "package", "extra"), [
    (("demo",), "torch", "demo"), (("profile", "l6-s2"), "torch", "demo"),
    (("bench", "fetch", "--tiny"), "torch", "demo"), (("bench", "operators", "--tiny"), "opentelemetry", "tracing"),
])  # fmt: skip
def test_a_command_without_the_package_of_an_extra_says_what_to_install(
    arguments: tuple[str, ...], package: str, extra: str
) -> None:
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name.partition('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from kvstore_ops.entry import enter\n"
        "enter()\n"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvstore: this needs the package {package}: pip install 'kvstore[{extra}]'\n"
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extra in listed
