"""Tables of replies, as a pipe has them."""

from __future__ import annotations

import io
import re

import pytest
from kvstore_ops import status
from kvstore_ops.operators import changing, tables
from rich.console import Console, RenderableType

from kvstore.v1alpha import admin_pb2


def drawn(found: admin_pb2.TiersResponse) -> str:
    return printed(tables.render_tiers(found), 80)


def printed(table: RenderableType, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO
    return text


def test_a_tiers_state_is_in_one_line_and_its_problem_is_told_once() -> None:
    stats = admin_pb2.TierStats(name="redis", state="failing", state_seconds=3600.0, is_shared=True)
    tier = admin_pb2.TierReport(stats=stats, write_policy="back", problem="the server is away")
    other = admin_pb2.TierStats(
        name="nvme", state="up", state_seconds=59.0, chunk_count=1234567, capacity_bytes=1 << 40
    )
    text = drawn(
        admin_pb2.TiersResponse(
            tiers=[tier, admin_pb2.TierReport(stats=other)], absent=["the server is away", "s3 is off"]
        )
    )
    assert text.count("the server is away") == 1
    assert "s3 is off" in text
    assert "up for 59 s" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_every_number_of_a_tier_is_whole_on_a_terminal_of_any_width(width: int) -> None:
    stats = admin_pb2.TierStats(
        name="redis", state="up", state_seconds=86400.0 * 6, is_shared=True, chunk_count=1234567,
        allocated_bytes=5 << 30, capacity_bytes=1023 << 30,
    )  # fmt: skip
    chosen = admin_pb2.EncodingReport(fingerprint=b"\xfe\x3a" * 16, encoding="lz4", line_bytes_per_second=1.5e9)
    tier = admin_pb2.TierReport(
        stats=stats, write_policy="reuse", durability=3, backlog_chunk_count=54321, encodings=[chosen]
    )
    text = printed(tables.render_tiers(admin_pb2.TiersResponse(tenant="blue", tiers=[tier])), width)
    assert "1,234,567" not in text  # keys of the engine, which an older sidecar takes for chunks
    said = ("blue", "redis", "reuse", "up for 6 d", "SHARED", "not told", "5 GiB", "1023 GiB", "54,321", "lz4")
    assert [each for each in said if each not in text] == []
    assert "fe3a" in text
    assert max(map(len, text.splitlines())) <= width


def test_a_tier_that_just_answers_a_call_is_not_told_to_be_stalled() -> None:
    stats = admin_pb2.TierStats(name="nvme", state="up", state_seconds=59.0)
    busy, silent = (admin_pb2.TierReport(stats=stats, stalled_seconds=each) for each in (0.4, 9.0))
    assert "up for 59 s" in drawn(admin_pb2.TiersResponse(tiers=[busy]))
    assert "stalled 9 s" in drawn(admin_pb2.TiersResponse(tiers=[silent]))


def test_a_drain_that_moves_nothing_calls_no_tier_empty() -> None:
    """A shared tier takes no more, and keeps what it has."""
    request = admin_pb2.ChangeRequest(selection=admin_pb2.Selection(tier="redis"), drain=admin_pb2.Drain())
    assert changing._nothing(request) == "nothing to move: redis takes no more"


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_every_fact_of_a_chunk_is_whole_on_a_terminal_of_any_width(width: int) -> None:
    chunk = admin_pb2.ChunkEntry(
        digest=bytes.fromhex("fe3a") * 16, model_id="org/a-model-with-a-long-name", token_count=256,
        byte_count=2 << 20, copies=[admin_pb2.ChunkCopy(tier="dram"), admin_pb2.ChunkCopy(tier="nvme")],
        is_pinned=True, stored_seconds=1,
    )  # fmt: skip
    text = printed(tables.render_chunks([chunk], [], 3600.0), width)
    said = ("chunk", "tokens", "256", "2 MiB", "memory?", "nvme?", "60 min", "pinned")
    assert [each for each in said if each not in text] == []
    assert ("fe3a" * 4 if width > 30 else "fe3a") in text  # which ``kvstore show`` takes
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_every_number_of_a_model_is_whole_on_a_terminal_of_any_width(width: int) -> None:
    tiers = [admin_pb2.TierTotal(tier=name, chunk_count=1234) for name in ("memory", "nvme", "redis")]
    model = admin_pb2.ModelTotal(
        model_id="org/a-model-with-a-long-name", fingerprint=bytes.fromhex("fe3a") * 16, chunk_count=54321,
        byte_count=1023 << 30, tiers=tiers, profiles=["segments"],
    )  # fmt: skip
    other = admin_pb2.ModelTotal(fingerprint=bytes.fromhex("1bad") * 16, chunk_count=3)
    text = printed(tables.render_models([model, other]), width)
    said = ("chunks", "54,321", "1023 GiB", "memory", "1,234", "redis", "segments", "fe3a", "1bad", "registered)")
    assert [each for each in said if each not in text] == []
    assert text.count("1,234") == 3
    assert width < 40 or "fe3a" * 4 in text  # which ``--model`` takes
    assert max(map(len, text.splitlines())) <= width


def test_the_first_line_of_the_status_is_one_line_and_tells_days_in_days() -> None:
    stats = admin_pb2.StatsResponse(version="0.2.0", tenant="red", server_pid=1234567, uptime_seconds=9 * 86_400)
    first = printed(status.render(stats), 80).splitlines()[0].rstrip()
    assert first == "kvstore 0.2.0, tenant red, pid 1234567, up 9 d"


def test_nobody_counts_the_chunks_of_a_shared_tier() -> None:
    counts = {"state": "up", "chunk_count": 1234567, "allocated_bytes": 5 << 30, "capacity_bytes": 8 << 30}
    shared = admin_pb2.TierStats(name="redis", is_shared=True, **counts)
    own = admin_pb2.TierStats(name="nvme", **counts)
    text = printed(status.render(admin_pb2.StatsResponse(tiers=[own, shared])), 80)
    assert re.search(r"allocated +│ 5 GiB in 1,234,567 chunks", text)
    assert re.search(r"holds +│ 5 GiB of 8 GiB +│", text), text


def test_bytes_that_nobody_knows_are_not_told_as_none() -> None:
    """Of what left, or waits for a tier, only the number of chunks is known."""
    outcomes = [admin_pb2.Outcome(what="written", chunk_count=41), admin_pb2.Outcome(what="held", byte_count=1024)]
    text = printed(tables.render_outcomes(admin_pb2.ChangeResponse(outcomes=outcomes), dry_run=False), 80)
    assert re.search(r"written +│ +41 │ +│", text), text
    assert "1 KiB" in text
