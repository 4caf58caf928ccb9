"""The kvstore command as an operator meets it, and every benchmark at its smallest."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvstore_client import ChunkEvent, connect
from kvstore_ops import cli
from kvstore_ops.bench.peer import LMCACHE
from kvstore_ops.bench.peers import MOONCAKE
from kvstore_ops.cli import _benchmarks
from kvstore_ops.locate import read_tokens
from kvstore_ops.sidecar import Sidecar
from kvstore_ops.watch import follow

from kvstore.errors import InvalidRequest
from kvstore.keys import fingerprint
from tests.conftest import ROOT, WARM
from tests.ops.command import run
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

FIELDS = {"name", "value", "unit", "limit", "ratio", "target", "met", "runs", "spread", "conditions"}


def kvstore(*arguments: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    return WARM.run([sys.executable, "-m", "kvstore_ops.cli", *arguments], timeout=timeout, cwd=ROOT)


def test_status_of_a_running_sidecar(sidecar: Sidecar) -> None:
    socket = sidecar.address.removeprefix("unix://")
    table = kvstore("status", "--socket", socket)
    assert table.returncode == 0, table.stderr
    assert "of 64 MiB" in table.stdout
    found = json.loads(kvstore("status", "--socket", socket, "--json").stdout)
    assert found["arena"]["capacity_bytes"] == 64 << 20
    assert found["server_pid"] == sidecar.pid


def test_json_of_a_message_has_what_scripts_compare(sidecar: Sidecar) -> None:
    """Fingerprints as all commands write them, and names that are digits as names."""
    spec = small_spec(model_id="7")
    with connect(sidecar.address) as client:
        client.store(spec, tokens_of(40, 1), random_cache(spec, 40, 1)).wait(20)
    found = json.loads(kvstore("status", "--socket", sidecar.address.removeprefix("unix://"), "--json").stdout)
    (model,) = (each for each in found["models"] if each["model_id"] == "7")
    assert model["fingerprint"] == fingerprint(spec, spec.kind).hex()
    assert isinstance(model["byte_count"], int)
    assert model["byte_count"] > 0
    assert found["counters"]["store_committed_chunks"] >= 3
    assert found["tier_problem"] == ""


def test_status_of_nobody_names_the_remedy() -> None:
    done = kvstore("status", "--socket", "/nonexistent/kvstore.sock")
    assert done.returncode == 4
    assert "kvstore serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_config_shows_origins() -> None:
    rows = json.loads(kvstore("config", "--json").stdout)
    assert rows["arena.region_bytes"] == {"value": 256 << 20, "origin": "default"}
    assert rows["arena.prefault"] == {"value": True, "origin": "default"}
    assert rows["server.shutdown_grace_s"] == {"value": 10.0, "origin": "default"}
    assert rows["server.state_directory"]["value"].endswith("/kvstore")
    assert re.search(r"arena\.prefault +│ true ", kvstore("config").stdout)


def test_config_shows_long_values_and_all_names_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE__TIERS__NVME__DIRECTORY", "/long" * 40)
    shown = kvstore("config").stdout
    assert shown.count("/long") > 30
    assert "tiers.nvme.capacity_bytes" in shown
    assert "…" not in shown


def test_an_interrupted_command_ends_as_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvstore_ops.door.Door.open", interrupted)
    done = run("tiers")
    assert (done.code, done.out) == (130, "")
    assert "Traceback" not in done.err


def test_an_interrupted_watch_ends_with_0_only_where_it_has_no_other_end() -> None:
    def interrupted() -> Iterator[ChunkEvent]:
        raise KeyboardInterrupt
        yield

    follow(interrupted(), 0, as_json=False)
    with pytest.raises(KeyboardInterrupt):
        follow(interrupted(), 1, as_json=False)


def test_an_interrupt_while_the_command_is_imported_leaves_no_traceback() -> None:
    program = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'kvstore_ops.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from kvstore_ops.entry import enter\n"
        "enter()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_file_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "prompt.json"
    with pytest.raises(InvalidRequest, match=f"^--prompt {file} cannot be read: No such file or directory$"):
        read_tokens(file, "")


def test_a_tokenizer_that_is_not_on_this_machine_is_an_error_and_no_download(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers are not installed")
    (tmp_path / "prompt.txt").write_text("a text")
    wrong = tmp_path / "tokenizer"
    wrong.mkdir()
    (wrong / "tokenizer_config.json").write_text("{]")
    for name in ("nobody/nothing", str(wrong), "../[x]"):
        with pytest.raises(InvalidRequest, match="nothing is downloaded") as refused:
            read_tokens(tmp_path / "prompt.txt", name)
        assert "\n" not in refused.value.message


def test_results_that_have_no_place_are_refused_before_they_are_measured(tmp_path: Path) -> None:
    done = run("bench", "lookup", "--tiny", "--json", str(tmp_path / "absent" / "x.json"))
    assert (done.code, done.out) == (2, "")
    assert "there is no directory" in done.err


def test_the_first_sentences_of_every_command_stand_in_one_line_of_its_docstring() -> None:
    """The list of commands keeps their line breaks, and is torn by them."""
    group = cli.command()
    texts = {name: group.get_command(None, name).help or "" for name in group.list_commands(None)}
    told = {name: text.strip().split("\n\n")[0] for name, text in texts.items()}
    assert all(told.values())
    assert not [name for name, text in told.items() if "\n" in text]


def test_an_unknown_benchmark_is_named() -> None:
    done = kvstore("bench", "nonsense")
    assert done.returncode == 2
    assert "fetch" in done.stderr


@pytest.fixture(scope="module")
def tiny() -> dict[str, dict[str, Any]]:
    """What each benchmark finds. They share a process: half of a tiny run is imports."""
    command = [sys.executable, "-m", "tests.ops.tiny", "bench", "all", "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["name"]: each for each in found}


@pytest.mark.timeout(300)  # the first waits for all of them
@pytest.mark.parametrize("name", _benchmarks())
def test_every_benchmark_runs_tiny(tiny: dict[str, dict[str, Any]], name: str) -> None:
    assert set(tiny[name]) == FIELDS
    assert tiny[name]["value"] > 0


def test_one_benchmark_ends_with_its_row() -> None:
    done = kvstore("bench", "lookup", "--tiny")
    assert done.returncode == 0, done.stderr
    verdict, row = done.stdout.splitlines()[-2:]
    assert re.fullmatch(r"lookup: ratio .* keys/s >= 400 \(.*\); p50 of .* <= 1\.3 \(.*\): (met|NOT met)", verdict)
    assert json.loads(row)["name"] == "lookup"


def test_a_benchmark_of_vllm_says_how_to_get_it() -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is here")
    done = kvstore("bench", "vllm-cold", "--tiny")
    assert done.returncode == 4
    assert "make setup-vllm" in done.stderr
    assert "vllm-cold" in kvstore("bench", "list").stdout
    assert "vllm-cold" not in _benchmarks()  # and "all" leaves it out


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("peers", (LMCACHE, MOONCAKE)), ("peers-redis", (LMCACHE,)), ("peers-s3", (LMCACHE,))],
)
def test_a_benchmark_beside_somebody_else_says_what_it_needs_or_runs(name: str, wanted: tuple[str, ...]) -> None:
    done = kvstore("bench", name, "--tiny")
    if not any(each in os.environ for each in wanted):
        assert done.returncode == 4
        assert all(each in done.stderr for each in wanted)
        pytest.skip(f"{' and '.join(wanted)} name no environment of another product's")
    assert set(json.loads(done.stdout.splitlines()[-1])) == FIELDS, done.stderr


@pytest.mark.parametrize("arguments", [("version",), ("config",), ("config", "--json"), ("bench", "list")])
def test_output_that_cannot_be_written_is_one_line(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "kvstore_ops.cli", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100.0, cwd=ROOT, check=False
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (12, "kvstore: the output cannot be written: No space left on device\n")


FAILING = """
from kvstore.errors import Unavailable
from kvstore_ops import cli

def failing():
    print("some words")
    raise Unavailable("the sidecar is gone")

cli.command = lambda: failing
cli.main()
"""


def test_a_command_that_failed_says_so_though_its_output_is_lost() -> None:
    """Code 12 would say that what it was to do is done. Its words are still in the buffer when it fails."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", FAILING], stdout=full, stderr=subprocess.PIPE, text=True, timeout=100.0, cwd=ROOT,
            env=buffered, check=False,
        )  # fmt: skip
    assert done.returncode == 4
    assert "the sidecar is gone" in done.stderr
    assert "the output cannot be written" in done.stderr


class FullText(io.TextIOBase):
    """What a program has put in the place of its standard output."""

    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_reader_that_goes_early_is_no_bug_of_the_command(form: tuple[str, ...]) -> None:
    reader, out = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvstore_ops.cli", "config", *form]
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, cwd=ROOT, check=False, timeout=60)
    os.close(out)
    assert (done.returncode, done.stderr) == (12, b"")


def test_a_program_that_runs_a_command_keeps_its_own_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvstore", "version"])
    with contextlib.redirect_stdout(FullText()), pytest.raises(SystemExit) as ended:
        cli.main()
    os.write(1, b"its own words")
    found = capfd.readouterr()
    assert (ended.value.code, found.out) == (12, "its own words")
    assert "the output cannot be written" in found.err


@pytest.mark.parametrize("place", ["full", "closed"])
def test_a_sidecar_serves_though_nobody_can_be_told_that_it_does(place: str, tmp_path: Path) -> None:
    if place == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    places = ("--state-directory", str(tmp_path), "--socket-directory", str(tmp_path / "run"))
    command = [sys.executable, "-m", "kvstore_ops.cli", "serve", *places, "--capacity", "8 MiB", "--nvme", "0"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=out, stderr=log, cwd=ROOT)
    os.close(out)
    try:
        eventually(lambda: run("tiers", "--socket", str(tmp_path / "run" / "kvstore.sock")).code == 0, 30.0)
        assert "standard output cannot be written" in (tmp_path / "log").read_text()
    finally:
        process.terminate()
    assert process.wait(20) == 0, (tmp_path / "log").read_text()
