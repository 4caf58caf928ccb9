"""The kvstore command as an operator meets it, and every benchmark at its smallest."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from kvstore_ops.cli import _benchmarks
from kvstore_ops.sidecar import Sidecar

from tests.conftest import ROOT

FIELDS = {"name", "value", "unit", "limit", "ratio", "target", "met", "runs", "spread", "conditions"}


def kvstore(*arguments: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore_ops.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT)


def test_status_of_a_running_sidecar(sidecar: Sidecar) -> None:
    socket = sidecar.address.removeprefix("unix://")
    table = kvstore("status", "--socket", socket)
    assert table.returncode == 0, table.stderr
    assert "of 64 MiB" in table.stdout
    found = json.loads(kvstore("status", "--socket", socket, "--json").stdout)
    assert found["arena"]["capacity_bytes"] == 64 << 20
    assert found["server_pid"] == sidecar.pid


def test_status_of_nobody_names_the_remedy() -> None:
    done = kvstore("status", "--socket", "/nonexistent/kvstore.sock")
    assert done.returncode == 1
    assert "kvstore serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_config_shows_origins() -> None:
    rows = json.loads(kvstore("config", "--json").stdout)
    assert rows["arena.region_bytes"] == {"value": str(256 << 20), "origin": "default"}


def test_an_unknown_benchmark_is_named() -> None:
    done = kvstore("bench", "nonsense")
    assert done.returncode == 1
    assert "fetch" in done.stderr


@pytest.mark.parametrize("name", _benchmarks())
def test_every_benchmark_runs_tiny(name: str) -> None:
    done = kvstore("bench", name, "--tiny")
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(last) == FIELDS
    assert last["name"] == name
    assert last["value"] > 0
