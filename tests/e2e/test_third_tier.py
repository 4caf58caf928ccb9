"""A local tier that the service does not know, in a real server, behind NVMe and before it: it holds what the others
give up, and what it does wrong costs misses, no wrong bytes and no service."""

from __future__ import annotations

import io
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest
from kvstore_client import ChunkEvent, Client, EventKind, connect
from kvstore_ops.operators import calls
from kvstore_ops.status import render
from rich.console import Console

from kvstore.controller.operators.heartbeats import HEARTBEAT_S
from kvstore.errors import Unavailable
from kvstore.keys import chain_digests
from kvstore.spec import Durability, MissReason, Tier
from tests.e2e.test_nvme import same
from tests.e2e.test_watch import take
from tests.e2e.third_tier import CAPACITY_BYTES, KIND, ThirdTierSidecar
from tests.fakes import Switch
from tests.ops.command import run
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

COUNT = 2048
SPEC = small_spec(chunk_tokens=512)
SEEDS = range(24)
"""Contexts that take six times what memory has, and three times what NVMe has."""


def tokens(seed: int) -> Any:
    return tokens_of(COUNT, seed)


def store(client: Client, seed: int) -> Any:
    """The receipt."""
    return client.store(SPEC, tokens(seed), random_cache(SPEC, COUNT, seed))


def assert_right(client: Client, seed: int) -> None:
    """All of a context, to the bit."""
    fetched = client.fetch(SPEC, tokens(seed))
    assert fetched.token_count == COUNT
    assert same(fetched, random_cache(SPEC, COUNT, seed), COUNT)


def assert_missed(client: Client, seed: int, reason: MissReason) -> None:
    """Within the server's deadline, which is a second."""
    began_s = time.monotonic()
    fetched = client.fetch(SPEC, tokens(seed))
    assert (fetched.token_count, fetched.reason) == (0, reason)
    assert time.monotonic() - began_s < 10.0, "it was waited for"


def places(client: Client, seed: int) -> list[Tier]:
    """Where lookups say that its chunks are."""
    return [chunk.tier for chunk in client.lookup(SPEC, tokens(seed)).chunks]


def cold(client: Client) -> int:
    """A context that only the third tier has."""
    return next(seed for seed in SEEDS if set(places(client, seed)) == {KIND})


def counters(client: Client) -> dict[str, int]:
    return dict(client.stats().counters)


@pytest.fixture(scope="module")
def served() -> Iterator[ThirdTierSidecar]:
    """Behind NVMe, and each context was stored once. Every test leaves it so."""
    with ThirdTierSidecar("nvme,files") as running:
        with connect(running.address) as client:
            for count, seed in enumerate(SEEDS, 1):
                assert store(client, seed).wait(10.0) is Durability.LOCAL
                written = count * COUNT // SPEC.chunk_tokens
                eventually(lambda written=written: counters(client)["files_written_chunks"] == written)
        yield running


@pytest.fixture
def client(served: ThirdTierSidecar) -> Iterator[Client]:
    with connect(served.address) as connected:
        yield connected
        served.switches.turn_off()


def test_it_has_what_memory_and_nvme_gave_up(client: Client) -> None:
    counted = counters(client)
    assert counted["demoted_chunks"] > 0
    assert counted["nvme_demoted_chunks"] > 0
    assert counted["files_written_chunks"] == len(SEEDS) * COUNT // SPEC.chunk_tokens
    assert {name: counted[name] for name in ("evicted_chunks", "nvme_evicted_chunks", "files_evicted_chunks")} == {
        "evicted_chunks": 0, "nvme_evicted_chunks": 0, "files_evicted_chunks": 0,
    }  # fmt: skip
    assert {tier for seed in SEEDS for tier in places(client, seed)} == {Tier.DRAM, Tier.NVME, KIND}
    for seed in SEEDS:
        assert_right(client, seed)
    eventually(lambda: set(places(client, SEEDS[-1])) == {Tier.DRAM})  # what is used is brought into memory


def test_clients_are_told_of_moves_by_its_number(client: Client) -> None:
    seed = cold(client)
    first = chain_digests(tokens(seed), SPEC.chunk_tokens)[0]
    with client.watch() as events:

        def next_of_first() -> ChunkEvent:
            while (event := take(events, 1)[0]).digest != first:
                pass
            return event

        assert_right(client, seed)
        event = next_of_first()
        assert (event.kind, event.tier) == (EventKind.MOVED, Tier.DRAM)
        for other in SEEDS:
            if other != seed:
                assert_right(client, other)
        event = next_of_first()
        assert (event.kind, event.tier) == (EventKind.MOVED, KIND)


def test_operators_see_its_row(served: ThirdTierSidecar, client: Client) -> None:
    stats = client.stats()
    assert [tier.name for tier in stats.tiers] == ["nvme", "files"]
    assert stats.tier_problem == ""
    nvme, files = stats.tiers
    assert (files.capacity_bytes, files.state) == (CAPACITY_BYTES, "up")
    assert files.chunk_count > nvme.chunk_count > 0
    drawn = io.StringIO()
    Console(file=drawn).print(render(stats))
    assert re.search(r"nvme \(up( for \d+ s)?\)", drawn.getvalue())
    assert re.search(r"files \(up( for \d+ s)?\)", drawn.getvalue())
    log = [json.loads(line) for line in (served.directory / "log").read_text().splitlines()]
    url = next(line["metrics"] for line in log if line["message"] == "ready")
    with urllib.request.urlopen(url, timeout=10) as page:
        said = page.read().decode()
    rows = dict(re.findall(r'^kvstore_tier_capacity_bytes\{tier="(\w+)"\} (\S+)$', said, re.MULTILINE))
    assert {name: float(value) for name, value in rows.items()} == {
        tier.name: tier.capacity_bytes for tier in stats.tiers
    }
    assert "kvstore_files_written_chunks_total" in said


@pytest.mark.parametrize("kill", [False, True], ids=["clean", "killed"])
def test_a_restart_finds_what_it_has(served: ThirdTierSidecar, kill: bool) -> None:
    served.stop(kill=kill)
    served.start()
    with connect(served.address) as client:
        assert {tier for seed in SEEDS for tier in places(client, seed)} == {Tier.NVME, KIND}
        for seed in SEEDS:
            assert_right(client, seed)


def test_what_it_gives_back_wrong_is_a_miss_until_it_is_stored_again(served: ThirdTierSidecar, client: Client) -> None:
    seed, before = cold(client), counters(client)["quarantined_chunks"]
    served.switches.turn_on(Switch.CORRUPT)
    assert_missed(client, seed, MissReason.CORRUPT)
    served.switches.turn_off()
    assert_missed(client, seed, MissReason.CORRUPT)
    assert counters(client)["quarantined_chunks"] > before
    assert store(client, seed).wait(10.0) is Durability.LOCAL
    assert_right(client, seed)


def test_while_it_stalls_the_others_serve(served: ThirdTierSidecar, client: Client) -> None:
    seed, fresh = cold(client), SEEDS[-1] + 1
    served.switches.turn_on(Switch.STALLED)
    assert_missed(client, seed, MissReason.UNAVAILABLE)
    assert store(client, fresh).wait(10.0) is Durability.LOCAL, "NVMe has it"
    assert_right(client, fresh)
    served.switches.turn_off()
    assert_right(client, seed)


def test_while_it_is_away_stores_reach_nvme_and_it_gets_them_when_it_is_back(
    served: ThirdTierSidecar, client: Client
) -> None:
    seed, fresh, written = cold(client), SEEDS[-1] + 2, "files_written_chunks"
    before, chunk_count = counters(client), COUNT // SPEC.chunk_tokens
    served.switches.turn_on(Switch.AWAY)
    assert_missed(client, seed, MissReason.UNAVAILABLE)
    assert store(client, fresh).wait(10.0) is Durability.LOCAL
    assert "tiers.files: the fake is away" in client.stats().tier_problem
    assert_right(client, fresh)
    served.switches.turn_off()
    assert_right(client, seed)
    eventually(lambda: counters(client)[written] == before[written] + chunk_count, 20.0)
    assert client.stats().tier_problem == ""


def test_before_nvme_its_bad_copy_gives_way_to_the_good_one() -> None:
    """NVMe has room for everything here."""
    with ThirdTierSidecar("files,nvme", nvme="16 MiB") as running:
        with connect(running.address) as client:
            assert store(client, 0).wait(10.0) is Durability.LOCAL
            for name in ("files_written_chunks", "nvme_written_chunks"):  # either one alone is LOCAL
                eventually(lambda name=name: counters(client)[name] == COUNT // SPEC.chunk_tokens)
        running.stop()
        running.start()
        with connect(running.address) as client:
            assert [tier.name for tier in client.stats().tiers] == ["files", "nvme"]
            assert set(places(client, 0)) == {KIND}
            running.switches.turn_on(Switch.CORRUPT)
            assert_missed(client, 0, MissReason.CORRUPT)
            eventually(lambda: client.fetch(SPEC, tokens(0)).token_count == COUNT)
            assert_right(client, 0)


def test_a_command_waits_for_a_tier_that_is_slower_than_its_patience(
    served: ThirdTierSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up a silent sidecar only, and the sidecar tells all the while that it waits."""
    monkeypatch.setattr(calls, "ANSWER_S_MAX", HEARTBEAT_S + 1)
    socket = served.address.removeprefix("unix://")
    with connect(served.address) as client:
        digest = chain_digests(tokens(cold(client)), SPEC.chunk_tokens)[0].hex()
    served.switches.turn_on(Switch.STALLED)
    later = threading.Timer(2 * HEARTBEAT_S, served.switches.turn_off)
    later.start()
    try:
        done = run("verify", "--tier", "files", "--digest", digest, "--socket", socket, "--json")
    finally:
        later.cancel()
        served.switches.turn_off()
    assert done.code == 0, done.err
    assert done.json["outcomes"]["files: read"]["chunk_count"] == 1


def test_a_start_that_takes_long_is_ended_by_a_signal() -> None:
    """As the reading of a large device's headers does, or a device that does not answer."""
    own = ThirdTierSidecar("nvme,files")
    own.switches.turn_on(Switch.STALLED)
    with futures.ThreadPoolExecutor(1) as threads:
        starting = threads.submit(own.start)
        log = own.directory / "log"
        eventually(lambda: log.exists() and "tier attached" in log.read_text())  # NVMe is; the files are next
        process = own.process
        assert process is not None
        process.terminate()
        try:
            assert process.wait(15) == 0
        finally:
            process.kill()
        with pytest.raises(Unavailable):
            starting.result(15)
    assert not list((own.directory / "run").iterdir())
    assert "Traceback" not in log.read_text()
    own.switches.turn_off()
    with own, connect(own.address) as client:
        assert store(client, 0).wait().name == "LOCAL"
