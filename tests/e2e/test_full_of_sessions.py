"""A sidecar whose sessions are all taken: its operators see that, and raise the limit while it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.config import OPERATOR_SESSION_COUNT
from kvstore.errors import Exhausted
from tests.ops.command import Done, run
from tests.server.raw import Handoff, eventually


class Full:
    """A sidecar with as many clients as its limit allows, and its file of settings."""

    def __init__(self, place: Path) -> None:
        self.file = place / "kvstore.toml"
        self.limit(2)
        self.sidecar = Sidecar("--config", str(self.file), "--capacity", "16 MiB")

    def limit(self, session_count_max: int) -> None:
        self.file.write_text(f"[limits]\nsession_count_max = {session_count_max}\n")

    def ask(self, *command: str) -> Done:
        return run(*command, "--socket", self.sidecar.socket_address.removeprefix("unix://"))


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Full]:
    found = Full(tmp_path)
    with found.sidecar as sidecar, connect(sidecar.address), connect(sidecar.address):
        yield found


def test_operators_see_it_and_a_reload_raises_the_limit(full: Full) -> None:
    with pytest.raises(Exhausted, match="session_count_max"):
        connect(full.sidecar.address)
    for command in (["status"], ["tiers"], ["models"], ["top", "--count", "1"], ["evict", "--all", "--yes"]):
        done = full.ask(*command)
        assert done.code in (0, 3), done
    doctor = full.ask("doctor", "--json")
    found = {each["subject"]: each for each in doctor.json}
    assert (doctor.code, found["sessions"]["health"], found["sidecar"]["health"]) == (11, "bad", "good")
    assert "limits.session_count_max" in found["sessions"]["said"]
    assert "kvstore reload" in found["sessions"]["remedy"]
    full.limit(3)
    (change,) = full.ask("reload", "--json").json["changes"]
    assert (change["name"], change["needs_restart"]) == ("limits.session_count_max", False)
    with connect(full.sidecar.address):
        assert {each["subject"] for each in full.ask("doctor", "--json").json} >= {"sessions"}
        with pytest.raises(Exhausted, match="session_count_max"):
            connect(full.sidecar.address)
    assert "sessions" not in {each["subject"] for each in full.ask("doctor", "--json").json}


def test_a_limit_beyond_the_open_files_is_not_taken_over(full: Full) -> None:
    full.limit(1 << 30)
    done = full.ask("reload")
    assert done.code == 2
    assert "limits.session_count_max" in done.err
    with pytest.raises(Exhausted, match="session_count_max"):
        connect(full.sidecar.address)


def test_a_client_that_calls_itself_an_operator_gains_those_few_sessions(full: Full) -> None:
    directory = full.sidecar.directory

    def hello(stack: ExitStack, *, is_operator: bool) -> str:
        connection = stack.enter_context(Handoff(directory))
        reply, descriptors = connection.exchange(op="hello", version=1, operator=is_operator)
        for each in descriptors:
            os.close(each)
        return str(reply["op"])

    with ExitStack() as stack:
        assert hello(stack, is_operator=False) == "error"
        for _ in range(OPERATOR_SESSION_COUNT):
            assert hello(stack, is_operator=True) == "welcome"
        assert hello(stack, is_operator=True) == "error"
        done = full.ask("status")
        assert done.code == 7
        assert "limits.session_count_max" in done.err
    eventually(lambda: full.ask("status").code == 0)
