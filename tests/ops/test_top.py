"""``kvstore top`` on terminals of several widths, and what its lines say."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar
from kvstore_ops.top.frame import lines_of
from kvstore_ops.top.sample import Rates, Sample

from kvstore.v1alpha import admin_pb2
from tests.conftest import ROOT
from tests.ops.command import run
from tests.security.tenancy import client_of, tenants_sidecar
from tests.specs import random_cache, small_spec, tokens_of

WALL_S = 1_800_000_000
WIDTHS = (1, 20, 59, 60, 80, 200)


def sample(at_s: float, uptime_s: float = 100.0, **counters: int) -> Sample:
    stats = admin_pb2.StatsResponse(version="0.1.0", tenant="default", uptime_seconds=uptime_s, counters=counters)
    stats.models.add(model_id="[red]\x1b[2Jmodel" + "x" * 500, chunk_count=10**9, byte_count=1 << 50)
    dram = admin_pb2.TierStats(name="dram", state="up", capacity_bytes=100, allocated_bytes=50, chunk_count=10**9)
    shared = admin_pb2.TierStats(name="s3", state="failing", is_shared=True, chunk_count=77)
    hours = [(WALL_S - 1800, 7, 0.0), (WALL_S - 7200, 1000, 90.0), (WALL_S - 90_000, 10**6, 0.0)]
    for start_s, token_count, seconds in hours:
        saving = admin_pb2.Saving(fetch_count=1, token_count=token_count, saved_seconds=seconds)
        stats.models[0].served_hours.add(start_seconds=start_s, saving=saving)
    stats.models[0].served.token_count = int(10 * at_s)
    prefixes = [
        admin_pb2.HotPrefix(above=above, digest=bytes([above] * 32), model_id="m\x1b" + "x" * 500, token_count=1 << 20,
                            heat=3.25, tier="dram" if above else "")
        for above in (0, 1, 2, 99)
    ]  # fmt: skip
    waiting = admin_pb2.WaitingMoves(interactive=1, batch=10**8, moving=8)
    tiers = [
        admin_pb2.TierReport(stats=dram),
        admin_pb2.TierReport(
            stats=shared, problem="access denied " * 50, backlog_chunk_count=10**8 + 9, waiting=waiting
        ),
    ]
    plans = [
        admin_pb2.PlanEntry(number=2, model_id="m[/]\x1b" + "x" * 500, state="on its way"),
        admin_pb2.PlanEntry(number=1, model_id="m", state="done", end={"ttft_seconds": 2.0, "wait_seconds": 0.5}),
    ]
    tenants: dict[str, admin_pb2.StatsResponse | str] = {
        f"tenant-{number}\x1b": admin_pb2.StatsResponse(
            arena={"used_bytes": number << 30, "chunk_count": 10**9}, tiers=[{"allocated_bytes": 1 << 50}]
        )
        for number in range(6)
    }  # fmt: skip
    tenants["closed"] = "its socket serves \x1b its user alone" * 9
    return Sample(
        at_s, stats, admin_pb2.TiersResponse(tiers=tiers, absent=["the nvme tier is off"]), prefixes, WALL_S, plans,
        tenants,
    )  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_longer_than_the_terminal_is_wide(width: int) -> None:
    lines = lines_of(sample(0), sample(2, fetch_bytes=10**15, quarantined_chunks=3), width, "gone " * 100)
    assert max(line.cell_len for line in lines) <= width
    assert not any(set(line.plain) & set("\x1b\n\r") for line in lines)


def test_what_is_said_needs_no_colour() -> None:
    said = "\n".join(line.plain for line in lines_of(sample(0), sample(2, quarantined_chunks=3), 80, "it is gone"))
    assert "######......  50%" in said
    assert re.search(r"s3 +failing +not told +- +- +-", said)  # nobody counts a shared tier's chunks
    assert "! s3: access denied" in said
    assert "! the nvme tier is off" in said
    assert "! no answer: it is gone" in said
    assert "! 3 chunks failed their checks" in said
    assert "10 tokens/s not computed; this hour 7; 24 h 1,007, 2 min of prefill" in said
    assert re.search(r"^ +2 +-  on its way  m\[/\]\\u001b", said, re.MULTILINE)
    assert re.search(r"^ +1 +2\.000 s +0\.500 s  done +m$", said, re.MULTILINE)
    assert re.search(r"^1,048,576 +3\.2  gone +0000", said, re.MULTILINE)
    assert re.search(
        r"^  1,048,576 +3\.2  memory +0101.*\n    1,048,576 .* 0202.*\n1,048,576 .* 6363", said, re.MULTILINE
    )


def test_an_alarm_is_whole_as_its_end_says_what_to_do() -> None:
    problem = "tiers.s3: read failed: there is no such bucket: create it, or set tiers.s3.bucket to one that is there"
    said = [line.plain for line in lines_of(sample(0), sample(2), 80, problem)]
    assert f"! no answer: {problem}" in " ".join(" ".join(said).split())
    assert said[2].startswith("  ")
    cut = [line.plain for line in lines_of(sample(0), sample(2), 20, "gone " * 40)]
    assert sum("gone" in each for each in cut[:9]) == 4, cut


def test_twenty_columns_have_every_number() -> None:
    counted = {"fetched_chunks": 30, "s3_fetched_chunks": 10, "fetched_kv_chunks": 40, "store_refused_chunks": 8}
    said = [line.plain for line in lines_of(sample(0), sample(2, **counted), 20)]
    for wanted in ("kvstore 0.1.0", " tenant default", " refused 4.0/s", "hits: memory 75%", " s3 25%", " of kv 100%",
                   "queue of s3: 1 wante", " 8 moving", "1,048,576 gone 0000"):  # fmt: skip
        assert any(each.startswith(wanted) for each in said), (wanted, said)


def test_hits_queues_and_tenants_are_told() -> None:
    counted = {"fetched_chunks": 30, "s3_fetched_chunks": 10, "fetched_kv_chunks": 38, "fetched_e_chunks": 2}
    said = "\n".join(line.plain for line in lines_of(sample(0), sample(2, **counted), 80))
    assert "hits: memory 75%, s3 25%, of kv 95%, e 5%" in said
    assert "queue of s3: 1 wanted now, 100,000,000 at leisure, 8 moving" in said
    assert re.search(r"^closed +its socket serves", said, re.MULTILINE)  # who is not told comes first
    assert re.search(r"^tenant-5\S* +5\.0 GiB +1\.0 PiB +1,000,000,000$|^tenant-5\S* +5 GiB ", said, re.MULTILINE), said
    assert "and 2 more" in said


def test_rates_are_those_between_two_looks_and_over_a_restart_those_since_the_start() -> None:
    earlier, later = sample(10.0, fetch_calls=100), sample(12.0, fetch_calls=150)
    assert Rates(earlier, later).of("fetch_calls") == 25
    assert Rates(None, later).of("fetch_calls") == 1.5
    assert Rates(later, sample(14.0, uptime_s=2.0, fetch_calls=6)).of("fetch_calls") == 3
    assert Rates(earlier, later).of("a_counter_of_another_release") == 0
    assert Rates(earlier, earlier).of("fetch_calls") == 1


SIZELESS = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
"""The terminal says how large it is."""


class Terminal:
    """``kvstore top`` on a terminal of its own."""

    def __init__(self, sidecar: Sidecar, width: int, height: int, **environment: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.before = termios.tcgetattr(theirs)
        command = [sys.executable, "-m", "kvstore_ops.cli", "top", "--interval", "0.2"]
        command += ["--socket", sidecar.address.removeprefix("unix://")]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True,
            env={**SIZELESS, "TERM": "xterm-256color", **environment},
        )  # fmt: skip
        self.theirs = theirs
        self.said = ""

    def until(self, word: str, seconds: float = 60.0) -> None:
        until_s = time.monotonic() + seconds
        while word not in self.said:
            assert time.monotonic() < until_s, self.said[-2000:]
            if select.select([self.ours], [], [], 0.2)[0]:
                self.said += os.read(self.ours, 65536).decode("utf-8", "replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.mark.parametrize(
    ("width", "height", "key"), [(80, 24, b"q"), (20, 10, signal.SIGINT), (80, 24, signal.SIGTERM)]
)
def test_it_quits_cleanly_on_a_wide_and_on_a_narrow_terminal(
    sidecar: Sidecar, width: int, height: int, key: bytes | signal.Signals
) -> None:
    spec = small_spec(model_id="short")
    with connect(sidecar.address) as client:
        client.store(spec, tokens_of(32), random_cache(spec, 32)).wait(10)
    terminal = Terminal(sidecar, width, height, NO_COLOR="1")
    try:
        terminal.until("memory")
        if isinstance(key, bytes):
            os.write(terminal.ours, key)
        else:
            os.kill(terminal.process.pid, key)
        terminal.until("\x1b[?1049l")  # the screen that was there before is back
        assert terminal.process.wait(20) == (143 if key is signal.SIGTERM else 0)
        assert termios.tcgetattr(terminal.theirs) == terminal.before
        assert "Traceback" not in terminal.said
        assert terminal.said.rindex("\x1b[?25h") > terminal.said.rindex("\x1b[?25l")  # the cursor, too
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", terminal.said)  # no colour
        shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.said)
        assert max(map(len, re.split(r"[\r\n]+", shown))) <= width + 1
    finally:
        terminal.close()


def test_without_a_terminal_it_prints_as_many_looks_as_were_asked_for(sidecar: Sidecar) -> None:
    socket = sidecar.address.removeprefix("unix://")
    done = run("top", "--count", "2", "--interval", "0.2", "--socket", socket)
    assert done.code == 0
    assert done.out.count("tenant default") == 2
    assert "\x1b" not in done.out
    assert run("top", "--interval", "0", "--socket", socket).code == 2
    assert run("top", "--count", "1", "--socket", "/nonexistent/kvstore.sock").code == 4


def test_the_default_tenants_operator_sees_where_fetches_came_from_and_all_tenants() -> None:
    own = {f"KVSTORE__TENANTS__{name}__NVME_CAPACITY_BYTES": "32 MiB" for name in ("A", "B")}
    with tenants_sidecar("--capacity", "16 MiB", nvme="32 MiB", **own) as sidecar:
        socket = sidecar.socket_address.removeprefix("unix://")
        spec = small_spec(model_id="short")
        for tenant in ("a", "b"):
            with client_of(sidecar, tenant) as client:
                client.store(spec, tokens_of(32), random_cache(spec, 32)).wait(10)
                if tenant == "b":
                    name = ("--socket", socket, "--tenant", "b")
                    assert run("move", "--model", "short", "--to", "nvme", "--yes", *name).code == 0
                    client.fetch(spec, tokens_of(32))  # from the device
                    client.fetch(spec, tokens_of(32))  # from memory, by a call or without
        done = run("top", "--count", "1", "--socket", socket)
        assert re.search(r"^a +\d.* 2$", done.out, re.MULTILINE), done.out
        assert re.search(r"^b +\d.* 2$", done.out, re.MULTILINE), done.out
        done = run("top", "--count", "1", "--socket", socket, "--tenant", "b")
        assert re.search(r"^hits: memory \d+%, nvme \d+%, of kv 100%$", done.out, re.MULTILINE), done.out
        assert "other tenants" not in done.out
