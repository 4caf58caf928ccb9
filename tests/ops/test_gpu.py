"""``make gpu``: it ends in time whatever its parts do, and says what ran, what was cut, and what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvstore_ops.bench import GPU, card
from kvstore_ops.gpu import __main__ as command
from kvstore_ops.gpu import hardware, parts, report
from kvstore_ops.gpu.process import Outcome, outcome_of

from kvstore.errors import InvalidRequest, Unavailable
from tests.conftest import ROOT

NOTHING = {
    "gpus": [], "cuda": "", "cuda_devices": 0, "torch": "", "triton": "", "transformers": "", "kvikio": "",
    "gds": False, "machine": "2 cores", "system": "", "python": "", "compiled_copies": False,
}  # fmt: skip
ALL = {
    **NOTHING, "gpus": [{"name": "H200"}], "cuda": "13.0", "cuda_devices": 1, "torch": "2.13", "triton": "3.6",
    "transformers": "5", "kvikio": "26", "gds": True,
}  # fmt: skip
TOLD = {"commit": "abc", "date": "today", "hardware": ALL, "missing": {}}


def python(code: str, limit_s: float = 20.0, junit: Path | None = None) -> Outcome:
    return outcome_of("part", [sys.executable, "-c", code], limit_s, junit)


def test_a_part_ends_with_the_last_json_of_its_output() -> None:
    found = python("print('a table'); print('{\"value\": 1}'); print('{\"value\": 2}'); print('bye')")
    assert (found.state, found.result) == ("done", {"value": 2})
    assert "a table" in found.tail


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "print('no result')", "import os; os.kill(os.getpid(), 9)"])
def test_a_part_without_a_result_has_failed(code: str) -> None:
    assert python(code).state == "failed"


def test_a_part_is_cut_with_all_that_it_started() -> None:
    code = """
import subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print(child.pid, flush=True)
time.sleep(60)
"""
    began_s = time.monotonic()
    found = python(code, 2.0)
    assert found.state == "cut"
    assert time.monotonic() - began_s < 20.0
    child = Path(f"/proc/{int(found.tail.split()[0])}/status")
    until_s = time.monotonic() + 10.0
    while child.exists() and "zombie" not in child.read_text() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not child.exists() or "zombie" in child.read_text()


def test_tests_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\ndef test_left(): pytest.skip('no GDS here')\n"
    )
    junit = tmp_path / "x.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={junit}", str(tmp_path)]
    found = outcome_of("tests", [*command, "-c", "/dev/null", f"--rootdir={tmp_path}"], 60.0, junit)
    assert found.state == "failed"
    assert [found.result[each] for each in ("passed", "failed", "skipped")] == [1, 1, 1]
    assert "test_bad" in found.result["failures"][0]
    assert "no GDS here" in found.result["whys"][0]


@dataclass(frozen=True)
class Told:
    """A part that takes a known time of a clock of its own."""

    name: str
    share: float
    takes_s: float
    clock: list[float]
    limits: list[float]

    def run(self, limit_s: float, scale: str, directory: Path) -> Outcome:
        self.limits.append(limit_s)
        self.clock[0] += min(limit_s, self.takes_s)
        return Outcome(name=self.name, state="done", seconds=0.0, limit_s=limit_s)


def test_what_one_part_leaves_goes_to_the_others_and_none_takes_more_than_its_share(tmp_path: Path) -> None:
    clock, limits = [0.0], list[float]()
    some: Any = [Told("long", 1.0, 1e9, clock, limits), Told("short", 1.0, 1.0, clock, limits),
                 Told("last", 2.0, 1e9, clock, limits)]  # fmt: skip
    left: Callable[[], float] = lambda: 100.0 - clock[0]  # noqa: E731 - as the command has it
    assert len(list(parts.outcomes(some, "tiny", tmp_path, left))) == 3
    assert limits == pytest.approx([25.0, 25.0, 74.0])
    assert clock[0] == pytest.approx(100.0)


def test_the_parts_are_the_tests_and_each_benchmark_of_a_gpu() -> None:
    names = [part.name for part in parts.chosen(())]
    assert names[:2] == ["gpu-tests", "kernel-tests"]
    assert set(names[2:]) <= set(GPU)
    assert {"gpu-fetch", "gpu-store", "gpu-hbm", "gpu-ttft-prefix", "gpu-ttft-blend", "gpu-ttft-sibling"} <= set(names)
    assert [part.name for part in parts.chosen(("gpu-store",))] == ["gpu-store"]
    with pytest.raises(InvalidRequest, match="gpu-fetch"):
        parts.chosen(("nonsense",))


def test_what_is_missing_is_said_with_what_it_leaves_untested() -> None:
    assert hardware.missing(ALL) == {}
    lacks = hardware.missing(NOTHING)
    assert list(lacks) == ["GPU", "torch with CUDA", "Triton", "transformers", "kvikio", "GPUDirect Storage"]
    assert all(lacks.values())
    assert set(hardware.hardware()) == set(NOTHING)


def test_without_a_gpu_it_says_so_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "hardware", lambda: NOTHING)
    monkeypatch.setattr(sys, "argv", ["gpu", "--json", str(tmp_path / "x.json")])
    assert command.main() == 0
    said = capsys.readouterr().out
    assert all(f"no {name}; untested: " in said for name in hardware.missing(NOTHING))
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["parts"] == []
    assert written["missing"]


def test_an_unknown_part_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "kvstore_ops.gpu", "--only", "x"], capture_output=True, cwd=ROOT)
    assert done.returncode == 2
    assert b"gpu-fetch" in done.stderr


def test_the_table_has_a_row_for_each_case_and_for_what_did_not_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = {"value": 5e9, "limit": 1e10, "ratio": 0.5, "met": False, "target": ">= 0.9"}
    result = {
        "unit": "B/s",
        **case,
        "conditions": {"cases": {"4096 tokens": case, "32768 tokens": {**case, "met": True}}},
    }
    outcomes = [
        Outcome(name="gpu-tests", state="done", seconds=3, limit_s=9,
                result={"passed": 7, "failed": 0, "skipped": 1, "failures": [], "whys": []}),
        Outcome(name="gpu-fetch", state="done", seconds=4, limit_s=9, result=result),
        Outcome(name="gpu-kernels", state="cut", seconds=9, limit_s=9, tail="the last words"),
        Outcome(name="gpu-store", state="failed", seconds=1, limit_s=9, tail="[bold]a traceback"),
    ]  # fmt: skip
    report.show(TOLD, outcomes)
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if line.startswith("│")]
    assert len(rows) == 5
    assert "7 passed, 0 failed, 1 skipped" in rows[0]
    assert "4096 tokens" in rows[1]
    assert "5.00 GB/s" in rows[1]
    assert "32768 tokens" in rows[2]
    assert "cut at 9 s" in rows[3]
    assert "failed" in rows[4]
    assert "the last words" in said
    assert "[bold]a traceback" in said
    assert "H200" in said
    limit = {"value": 3e12, "unit": "FLOP/s", "limit": 0.0, "ratio": 0.0, "target": "", "met": True}
    kernels = {
        "unit": "B/s",
        **case,
        "conditions": {"cases": {"matmul": limit}, "errors": {"gather": "no shared memory"}},
    }
    report.show(TOLD, [Outcome(name="gpu-kernels", state="done", seconds=3, limit_s=9, result=kernels)])
    said = capsys.readouterr().out
    assert "3,000.00 GFLOP/s" in said
    assert "gather: no shared memory" in said
    report.write(tmp_path / "x.json", TOLD, outcomes)
    written = json.loads((tmp_path / "x.json").read_text())
    assert [each["state"] for each in written["parts"]] == ["done", "done", "cut", "failed"]
    assert (written["commit"], written["hardware"]["cuda"]) == ("abc", "13.0")


def test_a_gpus_benchmark_needs_one_except_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert card.device_of("tiny") == "cpu"
    with pytest.raises(Unavailable, match="no CUDA device"):
        card.device_of("quick")


def test_the_commit_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore_ops.bench.origin import origin

    monkeypatch.setenv("KVSTORE_COMMIT", "1234567")
    assert origin("tiny")["commit"] == "1234567"
    monkeypatch.setenv("KVSTORE_COMMIT", "")
    monkeypatch.setenv("PATH", "/nowhere")
    assert origin("tiny")["commit"] == "unknown"
