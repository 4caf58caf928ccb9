"""``kvstore fleet``: a small trace of conversations, on a fleet whose shared tier is fast, slow, or busy."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kvstore_ops.cli import app
from kvstore_ops.fleet.hardware import Hardware
from kvstore_ops.fleet.simulation import Fleet, FleetReport
from kvstore_ops.fleet.trace import TracedRequest, read_trace
from typer.testing import CliRunner

from kvstore.errors import InvalidRequest
from kvstore.planning.loading import ComputeRate, TierRate
from kvstore.spec import Tier
from kvstore.units import GIB

BLOCK = 512


def hardware(shared_bytes_per_s: float, **more: Any) -> Hardware:
    """No device, and memory for sixteen blocks: nearly all lies in the shared tier. A block is 64 MiB, and is computed
    in 64 ms."""
    given: dict[str, Any] = {
        "engines": 4, "compute": ComputeRate(0.0, 1 / 8000, 0.0, 1.0, 1.0, 1), "memory_bytes": GIB, "device_bytes": 0,
        "shared": TierRate(0.0, 1 / shared_bytes_per_s, 1.0, 1), "layers": 8, **more,
    }  # fmt: skip
    return Hardware(**given)


def conversations(count: int = 24, turns: int = 4, every_s: float = 2.0) -> list[TracedRequest]:
    """Each turn has all of those before it, and four blocks more. All behind one preamble of two blocks."""
    found = []
    for turn in range(turns):
        for number in range(count):
            own = tuple(1000 * (number + 1) + block for block in range(4 * (turn + 1)))
            at_s = every_s * (turn * count + number)
            found.append(TracedRequest(at_s, BLOCK * (2 + len(own)) + 7, (1, 2, *own)))
    return found


def trace_file(path: Path, requests: list[TracedRequest]) -> Path:
    lines = [
        {"timestamp": 1000 * each.at_s, "input_length": each.token_count, "hash_ids": list(each.blocks)}
        for each in requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def both(found: Hardware, requests: list[TracedRequest]) -> tuple[FleetReport, FleetReport]:
    return Fleet(found, plans=False).run(requests), Fleet(found, plans=True).run(requests)


def test_what_is_loaded_and_what_is_computed_are_all_tokens() -> None:
    requests = conversations()
    for report in both(hardware(1e9), requests):
        assert len(report.ttfts_s) == len(requests)
        assert report.computed_tokens + report.loaded_tokens == sum(each.token_count for each in requests)
    loaded, planned = both(hardware(1e9), requests)
    stored = loaded.loaded_tokens * hardware(1.0).token_bytes
    assert loaded.read_bytes.total() == stored
    assert not loaded.refused_bytes.total()
    assert not loaded.refused_requests
    unique = len({block for each in requests for block in each.blocks}) * hardware(1.0).block_bytes
    assert loaded.written_bytes == planned.written_bytes == Counter({Tier.S3: unique, Tier.NVME: 0})


def test_where_loading_is_always_sooner_plans_change_nothing() -> None:
    """But for the first requests, before anything was measured."""
    loaded, planned = both(hardware(20e9), conversations())
    assert planned.mean_ttft_s <= 1.02 * loaded.mean_ttft_s
    assert planned.loaded_tokens >= 0.97 * loaded.loaded_tokens


def test_where_loading_is_slower_plans_compute() -> None:
    """A block takes 0.64 s to load, and 64 ms to compute."""
    requests = conversations()
    loaded, planned = both(hardware(100e6), requests)
    computed = Fleet(hardware(100e6), plans=False, keeps=False).run(requests)
    alone = [TracedRequest(each.at_s, each.token_count, ()) for each in requests]
    assert planned.mean_ttft_s < 0.5 * loaded.mean_ttft_s
    assert planned.mean_ttft_s <= 1.1 * computed.mean_ttft_s
    assert computed.ttfts_s == Fleet(hardware(100e6), plans=False).run(alone).ttfts_s, "nothing is shared"
    assert not computed.loaded_tokens
    assert not computed.written_bytes.total()
    assert planned.p99_ttft_s < loaded.p99_ttft_s
    assert planned.refused_bytes[Tier.S3] > planned.read_bytes[Tier.S3]
    assert planned.refused_requests > 24


def test_a_queue_is_seen_before_it_is_joined() -> None:
    """One block loads in half the time of computing it, four engines' at once in twice: some load, some compute."""
    requests = conversations(every_s=0.4)
    loaded, planned = both(hardware(2e9), requests)
    assert planned.mean_ttft_s < loaded.mean_ttft_s
    assert planned.refused_bytes[Tier.S3] > 0
    assert 0 < planned.read_bytes[Tier.S3] < loaded.read_bytes[Tier.S3]


def test_the_command_says_both_for_people_and_for_machines(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "trace.jsonl", conversations(count=4))
    options = ["fleet", str(path), "--nvme", "0", "--memory", "1 GiB", "--rate", "shared=100MB", "--requests", "12"]
    said = CliRunner().invoke(app, options)
    assert said.exit_code == 0, said.output
    assert "12 requests, 8 engines on 2 nodes" in said.output
    assert "times as soon with plans" in said.output
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    assert found["planned"]["mean_ttft_s"] <= found["loaded"]["mean_ttft_s"]
    assert {found[way]["requests"] for way in ("plain", "loaded", "planned")} == {12}
    assert found["plain"]["loaded_tokens"] == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1, 2]", "line 2"), ("{", "line 2"),
        ('{"timestamp": 1, "input_length": 0, "hash_ids": []}', "input_length 0"),
        ('{"timestamp": NaN, "input_length": 5, "hash_ids": []}', "timestamp nan"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": ["a"]}', "line 2"),
    ],
)  # fmt: skip
def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 600, "hash_ids": [1, 2]}\n' + line + "\n")
    with pytest.raises(InvalidRequest, match=said):
        read_trace(path)
    assert len(read_trace(path, 1)) == 1


def test_options_that_cannot_be_are_named(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "trace.jsonl", conversations(count=1))
    for options, said in (
        (["--nodes", "9"], "--nodes 9"), (["--rate", "disk=1GB"], "--rate disk=1GB"),
        (["--prefill-tokens-per-s", "nan"], "--prefill-tokens-per-s nan"),
    ):  # fmt: skip
        result = CliRunner().invoke(app, ["fleet", str(path), *options])
        assert said in str(result.exception), result.output
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InvalidRequest, match="no request"):
        read_trace(tmp_path / "empty.jsonl")
