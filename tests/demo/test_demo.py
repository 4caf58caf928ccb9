"""The demo's text, its verdict, its table and its picture. The demo itself runs in ``make demo``."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

from kvstore_client import connect
from kvstore_ops.demo import reuse
from kvstore_ops.demo.nodes import QUIET, settings_of, shared_redis, show_places, wait_shared
from kvstore_ops.demo.scene import Outcome
from kvstore_ops.demo.show import picture, table
from kvstore_ops.demo.stage import ANOTHER_NODE, device_bytes, verdict
from kvstore_ops.demo.text import prompt_tokens
from kvstore_ops.sidecar import Sidecar
from rich.console import Console

from kvstore.spec import Durability, Tier
from tests.specs import random_cache, small_spec, tokens_of

COLD = Outcome(
    name="cold", pid=1, token_count=4160, reused_token_count=0, tier="none", lookup_s=0.01, fetch_s=0.0,
    prefill_s=5.9, ttft_s=6.0, total_s=7.0, one_pass_s=5.0, fetched_bytes=0, stored="memory", tokens=[1, 2],
)  # fmt: skip
WARM = replace(
    COLD, name="warm", pid=2, tier="dram", reused_token_count=4096, ttft_s=0.25, prefill_s=0.24, fetch_s=0.1,
    total_s=1.0, one_pass_s=0.0, fetched_bytes=50_000_000,
)  # fmt: skip
RESTARTED = replace(
    WARM, name="restarted", pid=3, sidecar_pid=9, tier="nvme", ttft_s=0.5, prefill_s=0.49, fetch_s=0.3, total_s=1.3,
    device_bytes=50_331_648,
)  # fmt: skip

ELSEWHERE = replace(
    WARM, name=ANOTHER_NODE, pid=4, sidecar_pid=10, tier="redis", ttft_s=0.4, prefill_s=0.39, fetch_s=0.2
)


def judged(*later: Outcome) -> tuple[int, str]:
    console = Console(width=200, file=io.StringIO(), record=True)
    return verdict([COLD, *later], console), console.export_text()


def test_the_promise_is_checked() -> None:
    assert judged(WARM, RESTARTED, ELSEWHERE) == (0, "")
    for kept in (WARM, RESTARTED, ELSEWHERE):
        assert judged(replace(kept, tokens=[1, 3]))[0] == 1
        assert judged(replace(kept, reused_token_count=0))[0] == 1


def test_a_node_that_did_not_get_it_from_redis_is_named() -> None:
    code, said = judged(WARM, replace(ELSEWHERE, tier="dram"))
    assert code == 1
    assert "came from memory, not from Redis" in said


def test_what_the_device_did_not_do_is_said() -> None:
    assert "came from memory" in judged(WARM, replace(RESTARTED, tier="dram"))[1]
    assert "40,000,000 bytes were read" in judged(WARM, replace(RESTARTED, device_bytes=40_000_000))[1]
    code, said = judged(WARM, replace(RESTARTED, ttft_s=1.7))
    assert code == 0  # a busy machine is no fault
    assert "1.70 s, cold after 5.00 s" in said
    assert "when it is idle" in said


def test_the_table_compares_with_the_fairer_cold(tmp_path: Path) -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(table([COLD, WARM, RESTARTED, ELSEWHERE], "somebody"))
    text = console.export_text()
    for expected in ("20.0x", "10.0x", "4,096", "12.5x", "arena", "device", "Redis", "50 MB", "yes", "somebody"):
        assert expected in text
    picture([COLD, WARM, RESTARTED, ELSEWHERE], tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_device_account_counts_what_the_sidecar_reads() -> None:
    spec = small_spec()
    tokens = tokens_of(160)
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB", environment={**os.environ, **QUIET}) as sidecar:
        with connect(sidecar.address) as client:
            assert client.store(spec, tokens, random_cache(spec, 160)).wait(10.0) is Durability.LOCAL
        sidecar.stop()
        sidecar.start()
        before, source = device_bytes(sidecar)
        with connect(sidecar.address) as client:
            fetched = client.fetch(spec, tokens)
        assert fetched.tier is Tier.NVME
        after, who = device_bytes(sidecar)
        assert who == source
        assert fetched.byte_count <= after - before < fetched.byte_count + (1 << 20)


def test_another_node_gets_the_prompt_from_redis_and_both_are_located() -> None:
    spec, tokens = small_spec(), tokens_of(160)
    console = Console(width=80, file=io.StringIO(), record=True)
    with shared_redis() as url:
        first, second = (Sidecar("--capacity", "32 MiB", environment=settings_of(name, url)) for name in ("a", "b"))
        with first, second:
            with connect(first.address) as client:
                client.store(spec, tokens, random_cache(spec, 160)).wait(10.0)
            wait_shared(first)
            with connect(second.address) as client:
                assert client.fetch(spec, tokens).tier is Tier.REDIS
            show_places(second, tokens, console)
    said = console.export_text()
    for place in ("a ", "b (asked)", "(all nodes)", "redis", "memory"):
        assert place in said


def test_the_text_is_real_and_its_beginnings_differ() -> None:
    prompt = prompt_tokens(4096, 64)
    assert len(prompt) == 4160
    assert len(set(prompt)) > 500
    assert prompt_tokens(256, 64, offset=7)[:20] != prompt[:20]


def test_caches_that_are_not_exact_mislead_until_they_are_mended() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    with Sidecar("--capacity", "64 MiB") as sidecar, connect(sidecar.address) as client:
        reuse.perform(client, console, count=8)
    rows = [line.split("│") for line in console.export_text().splitlines() if " ms " in line]
    right = [float(row[2].split("+-")[0]) for row in rows]
    assert [int(row[5]) for row in rows] == [0, 192, 192] * 2
    assert ["by its profile: in full" not in row[1] for row in rows] == [True] * 6
    assert ["by its profile" in row[1] for row in rows] == [False, False, True] * 2
    assert client.statistics()["drift_checks"] == 2  # the first of each scene, which is no row's
    for full, naive, mended in (right[:3], right[3:]):
        assert naive < mended - 0.2
        assert mended > full - 0.15
