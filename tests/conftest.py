"""Shared by all tests: hypothesis without deadlines (machines are noisy), and a service on simulated parts."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from kvstore_ops.sidecar import Sidecar

pytest.register_assert_rewrite(*(f"tests.{each.stem}" for each in Path(__file__).parent.iterdir()))  # helpers, too

from tests.warm import Warm  # noqa: E402  # a module that was imported before is not rewritten

gc.disable()  # until all tests are collected: what is imported stays, and looking through it was a sixth of the time

IS_FULL = os.environ.get("KVSTORE_TEST_SCALE") == "full"
settings.register_profile(
    "kvstore",
    deadline=None,
    max_examples=40 if IS_FULL else 20,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("kvstore")

if not IS_FULL:  # models this small wait longer for a second thread than they compute
    os.environ.setdefault("OMP_NUM_THREADS", "1")

LONG_FILES = (
    "tests/ops/test_commands.py", "tests/ops/test_guides.py", "tests/crash/test_crash.py", "tests/sim/test_sim.py",
)  # fmt: skip
"""A minute each or so. They come first: one that began last would have a process to itself while the others rest."""

TRUE_STARTS = (
    "tests/server/test_life.py", "tests/server/test_descriptors.py", "tests/security/test_process.py",
    "tests/ops/test_sidecar.py", "tests/e2e/test_leaks.py",
)  # fmt: skip
"""The process itself is what these look at: their sidecars start as an operator's do. At full scale, all do."""

GARBAGE_COUNT = 10_000
"""New objects before Python looks for cycles. At its own 700, looking was a twelfth of all that tests computed."""

ROOT = Path(__file__).resolve().parents[1]
WARM = Warm(
    "kvstore.server.app", "kvstore_ops.commands", "kvstore_ops.options", "kvstore_ops.operators.harmless",
    "rich.console", "rich.table", "kvstore.remote.__main__", "tests.warm.commands", "tests.warm.ahead",
)  # fmt: skip
CLIENTS = Warm("kvstore_client", "tests.specs", "pytest", "hypothesis", "kvstore_ops.sidecar", "tests.server.raw")
"""For commands of Python that are clients of a sidecar: engines of a test in processes of their own."""
MOTO = Warm("moto.server", "moto.s3.responses")
"""For S3's server."""
EXAMPLES = Warm("kvstore_client.engines.transformers", "transformers.models.llama.modeling_llama")
"""For what guides have readers run, some of it beside a model."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Start sidecars warm, but for the files that look at the process."""
    is_true = IS_FULL or str(item.path.relative_to(ROOT)) in TRUE_STARTS
    Sidecar.launch = subprocess.Popen if is_true else WARM.popen
    done = yield
    if nextitem is None or nextitem.path != item.path:
        _keep()
    return done


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where all tests run in some processes, each compiles a part of them first, and finds the rest compiled when it
    collects. All would compile everything otherwise, side by side."""
    count, number = (os.environ.get(f"PYTEST_XDIST_WORKER{name}", "") for name in ("_COUNT", ""))
    if count and session.config.args == session.config.getini("testpaths"):
        for path in sorted(ROOT.glob("tests/**/test_*.py"))[int(number.removeprefix("gw")) :: int(count)]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection meets it again, and reports it
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish() -> None:
    gc.enable()
    gc.set_threshold(GARBAGE_COUNT, 20, 20)
    _keep()


def _keep() -> None:
    """Exempt all objects that exist now from garbage collection. Else each ``gc.collect`` of a test would look through
    all of it: reports, imports and models of all tests before, some tenths of a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    for each in (WARM, CLIENTS, MOTO, EXAMPLES):
        each.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, all else in its order."""
    names = [str(ROOT / name) for name in LONG_FILES]
    items.sort(key=lambda item: str(item.path) not in names)


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    """A real server process with a small arena, shared by a module's tests."""
    with Sidecar("--capacity", "64 MiB") as running:
        yield running


@pytest.fixture
def own_sidecar() -> Iterator[Sidecar]:
    """A real server process of one test's own: it may be killed."""
    with Sidecar("--capacity", "32 MiB") as running:
        yield running
