"""The publisher for routers, read by a subscriber."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.config import EventSettings
from kvstore.errors import InvalidRequest
from kvstore.keys import chain_digests
from kvstore.seams import SystemClock
from kvstore.server import publishing
from kvstore.server.publishing import open_publisher
from kvstore.telemetry.logs import MINUTE_LINES_MAX
from tests.conftest import WARM
from tests.controller.service import Service
from tests.e2e.test_watch import store
from tests.security.tenancy import client_of, secret_of, write_private
from tests.server.raw import eventually
from tests.server.router import DECODER, AllBlocksCleared, BlockRemoved, BlockStored, Router
from tests.specs import small_spec, tokens_of

SPEC = small_spec(model_id="published", adapter_id="lora")


@contextmanager
def published(directory: Path, nvme: str = "0", capacity: str = "32 MiB", **settings: str) -> Iterator[Sidecar]:
    environment = {
        **os.environ, "KVSTORE__EVENTS__ENDPOINT": f"ipc://{directory}/events",
        "KVSTORE__EVENTS__REPLAY_ENDPOINT": f"ipc://{directory}/replay", **settings,
    }  # fmt: skip
    with Sidecar("--capacity", capacity, nvme=nvme, environment=environment) as sidecar:
        yield sidecar


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    found = Router(tmp_path)
    yield found
    found.close()


def test_only_the_default_tenants_blocks_are_published(router: Router, tmp_path: Path) -> None:
    """Whoever reaches the endpoint reads it all: it is no tenant's door."""
    secret = write_private(tmp_path / "secret", secret_of("a"))
    with published(tmp_path, KVSTORE__TENANTS__A__SECRET_FILE=secret) as sidecar:
        with client_of(sidecar, "a") as other, connect(sidecar.address) as client:
            store(other, 40, 1, SPEC)
            known = store(client, 40, 2, SPEC)
            eventually(lambda: router.catch_up() or set(router.known) == set(known))


def test_a_router_that_comes_late_knows_every_block_by_replay(router: Router, tmp_path: Path) -> None:
    with published(tmp_path) as sidecar, connect(sidecar.address) as client:
        first = store(client, 40, 1, SPEC)
        router.catch_up()
        assert isinstance(DECODER.decode(next(iter(router.batches.values()))).events[0], AllBlocksCleared)
        eventually(lambda: router.catch_up() or set(router.known) == set(first))
        events = [each for batch in router.batches.values() for each in DECODER.decode(batch).events]
        blocks = [each for each in events if isinstance(each, BlockStored)]
        assert [each.block_hashes for each in blocks] == [[digest] for digest in first]
        assert [each.parent_block_hash for each in blocks] == [None, *first[:-1]]
        assert [each.block_size for each in blocks] == [16, 16, 8]
        assert {(each.medium, each.lora_name) for each in blocks} == {("CPU", "lora")}


def test_a_router_that_listens_is_told_what_comes_and_goes(router: Router, tmp_path: Path) -> None:
    with published(tmp_path) as sidecar, connect(sidecar.address) as client:
        seeds = iter(range(100, 1000))
        others: set[bytes] = set()

        def is_heard() -> bool:
            others.update(store(client, 16, next(seeds), SPEC))
            router.listen()
            return router.sequence >= 0

        eventually(is_heard)  # a subscription takes a moment
        first = store(client, 40, 1, SPEC)
        last = store(client, 48, 1, SPEC)
        eventually(lambda: router.listen() or set(router.known) == {*first, *last, *others})
        big = small_spec(model_id="big", chunk_tokens=4096)
        for seed in range(80):
            others.update(store(client, 4096, seed, big))
        eventually(lambda: router.listen() or len(router.known) == client.stats().arena.chunk_count)
        assert first[-1] not in router.known, "what another chunk begins with makes room first"
        assert set(router.known) < {*first, *last, *others}


def test_what_is_no_prefix_of_a_prompt_is_no_block_of_a_router(router: Router, tmp_path: Path) -> None:
    import numpy as np

    from kvstore.spec import Exactness
    from tests.specs import random_cache

    with published(tmp_path) as sidecar, connect(sidecar.address) as client:
        kv, tokens = random_cache(SPEC, 16, 5), tokens_of(16, 5)
        client.store(SPEC, tokens, kv, exactness=Exactness.DERIVED).wait(10)
        client.store_segment(SPEC, tokens, kv).wait(10)
        hidden = {1: np.zeros((16, SPEC.hidden_size), np.uint16)}
        client.store(SPEC, tokens_of(16, 6), random_cache(SPEC, 16, 6), hidden=hidden).wait(10)
        last = store(client, 16, 7, SPEC)
        eventually(lambda: router.catch_up() or last[0] in router.known)
        assert set(router.known) == {*last, *chain_digests(tokens_of(16, 6), 16)}


def test_a_publisher_that_was_too_slow_begins_a_new_account(router: Router, tmp_path: Path) -> None:
    """A queue of one event overflows with every store of many chunks; the router's account is right in the end."""
    with published(tmp_path, KVSTORE__LIMITS__WATCH_EVENT_COUNT_MAX="1") as sidecar:
        with connect(sidecar.address) as client:
            digests = {digest for seed in range(5) for digest in store(client, 320, seed, SPEC)}
            eventually(lambda: router.catch_up() or set(router.known) == digests)
            cleared = [
                sequence for sequence, batch in router.batches.items()
                if isinstance(DECODER.decode(batch).events[0], AllBlocksCleared)
            ]  # fmt: skip
            assert len(cleared) > 1


def test_after_a_restart_a_router_learns_what_the_device_kept(router: Router, tmp_path: Path) -> None:
    with published(tmp_path, nvme="256 MiB") as sidecar:
        with connect(sidecar.address) as client:
            digests = store(client, 48, 1, SPEC)
        sidecar.stop()
        sidecar.start()
        late = Router(tmp_path)  # and no engine
        eventually(lambda: late.catch_up() or set(late.known) == set(digests))
        assert set(map(frozenset, late.known.values())) == {frozenset({"STORAGE"})}
        with connect(sidecar.address) as client:
            assert client.fetch(SPEC, tokens_of(48, 1)).token_count == 48
            eventually(lambda: late.catch_up() or set(map(frozenset, late.known.values())) == {frozenset({"CPU"})})
        late.close()


def test_a_request_that_is_no_sequence_is_ignored(router: Router, tmp_path: Path) -> None:
    with published(tmp_path) as sidecar, connect(sidecar.address) as client:
        for bad in ((b"",), (b"", b"short"), (b"", b"12345678", b"more")) * MINUTE_LINES_MAX:
            router.replay.send_multipart(bad)
        digests = store(client, 16, 1, SPEC)
        eventually(lambda: router.catch_up() or set(router.known) == set(digests))
        log = (sidecar.directory / "log").read_text()
        assert 0 < log.count("no sequence number") <= 2 * MINUTE_LINES_MAX, "whoever asks fills the log's disk"


def test_who_says_too_much_to_the_publisher_is_disconnected(router: Router, tmp_path: Path) -> None:
    """What a frame takes would be the server's memory."""
    with published(tmp_path) as sidecar, connect(sidecar.address) as client:
        monitor = router.replay.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        router.replay.send_multipart((b"", bytes(1 << 20)))
        assert monitor.poll(10_000), "the server took it"
        router.replay.disable_monitor()
        digests = store(client, 16, 1, SPEC)
        eventually(lambda: router.catch_up() or set(router.known) == set(digests))


async def test_a_replay_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is kept, and whoever asks for all of it again and again, others are served in between."""
    settings = EventSettings(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay")
    publisher = open_publisher(settings, Service().controller, SystemClock())
    assert publisher is not None
    for number in range(settings.buffer_count):
        publisher._kept.add(number, bytes(400))
    send, turns, sent_at = publisher._replay.send_multipart, 0, []

    async def noted(frames: tuple[bytes, ...]) -> None:
        sent_at.append(turns)
        await send(frames)

    monkeypatch.setattr(publisher._replay, "send_multipart", noted)
    publishing = asyncio.ensure_future(publisher.run())
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(settings.replay_endpoint)
        asking.send_multipart((b"", bytes(8)))
        async with asyncio.timeout(60.0):
            while len(sent_at) <= settings.buffer_count:
                await asyncio.sleep(0)
                turns += 1
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    publisher.close()
    assert sent_at[-1] - sent_at[0] >= 5


async def test_what_is_kept_for_a_replay_is_bounded_in_bytes_and_a_router_sees_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long batches, of which the number that is kept would be much memory."""
    monkeypatch.setattr(publishing, "KEPT_BYTES_MAX", 10_000)
    settings = EventSettings(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay")
    publisher = open_publisher(settings, Service().controller, SystemClock())
    assert publisher is not None
    begun, running = publisher._sequence, asyncio.ensure_future(publisher.run())
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(settings.replay_endpoint)
        for number in range(200):
            await publisher._send([{"type": "BlockRemoved", "block_hashes": [bytes(32)] * 20, "medium": str(number)}])
            assert publisher._kept.byte_count <= 10_000
        asking.send_multipart((b"", bytes(8)))
        answers = []
        async with asyncio.timeout(60.0):
            while not answers or answers[-1][3]:
                answers.append(await asking.recv_multipart())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    publisher.close()
    sequences = [int.from_bytes(each[2], "big", signed=True) for each in answers]
    assert sequences == [*range(sequences[0], publisher._sequence), -1], "the newest ones, and the end"
    assert sequences[0] > begun + 150, "the first of them is not the one that was asked for"
    assert 9_000 < sum(len(each[3]) for each in answers) <= 10_000


async def test_what_is_queued_for_a_router_that_does_not_read_is_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ counts messages: as few of them as there may be, long ones would be much memory."""
    queued_bytes, published_bytes = 256 << 10, 16 << 20
    monkeypatch.setattr(publishing, "KEPT_BYTES_MAX", queued_bytes)
    settings = EventSettings(endpoint=f"ipc://{tmp_path}/events")
    publisher = open_publisher(settings, Service().controller, SystemClock())
    assert publisher is not None
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as slow:
        slow.setsockopt(zmq.LINGER, 0)
        slow.set_hwm(1)
        slow.connect(settings.endpoint)
        slow.subscribe(b"")
        async with asyncio.timeout(60.0):
            while not await slow.poll(10):  # until it is heard
                await publisher._send([{"type": "AllBlocksCleared"}])
        sent_bytes, sizes, numbers = 0, list[int](), list[int]()
        while sent_bytes < published_bytes:
            blocks = [{"type": "BlockRemoved", "block_hashes": [bytes(32)], "medium": str(each)} for each in range(512)]
            await publisher._send(blocks)
            sent_bytes += 512 * 32
        while await slow.poll(500):
            _, _, payload = await slow.recv_multipart()
            sizes.append(len(payload))
            numbers += [int(each.medium) for each in DECODER.decode(payload).events if isinstance(each, BlockRemoved)]
    publisher.close()
    assert max(sizes) <= publishing.MESSAGE_BYTES_MIN
    assert numbers[:512] == list(range(512)), "a divided batch keeps its order"
    assert sum(sizes) < 4 * queued_bytes + (2 << 20), "and what the kernel has room for"


def start(**settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore_ops.cli", "serve", "--capacity", "8 MiB", "--nvme", "0"]
    return WARM.run(command, timeout=60, env={**os.environ, **settings})


@pytest.mark.parametrize(
    ("name", "address", "words"),
    [
        ("ENDPOINT", "tcp://*:5557", "events.allow_remote"),
        ("ENDPOINT", "tcp://0.0.0.0:5557", "events.allow_remote"),
        ("ENDPOINT", "udp://127.0.0.1:5557", "tcp://127.0.0.1:PORT"),
        ("REPLAY_ENDPOINT", "tcp://127.0.0.1:5558", "events.endpoint"),
    ],
)
def test_an_address_that_is_not_meant_stops_the_start(name: str, address: str, words: str) -> None:
    from kvstore.config import load

    with pytest.raises(InvalidRequest, match=words.replace("*", r"\*")):
        load(None, {f"KVSTORE__EVENTS__{name}": address, "HOME": "/h"})


def test_an_address_that_is_taken_stops_the_start_and_says_so(tmp_path: Path) -> None:
    with published(tmp_path), zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        done = start(
            KVSTORE__EVENTS__ENDPOINT=f"tcp://127.0.0.1:{port}",
            KVSTORE__SERVER__STATE_DIRECTORY=str(tmp_path / "state"), XDG_RUNTIME_DIR=str(tmp_path / "x"),
        )  # fmt: skip
    assert done.returncode == 1
    assert "events.endpoint" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_its_packages_the_start_names_them(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked" / "zmq"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('not here', name='zmq')\n")
    path = os.pathsep.join([str(tmp_path / "blocked"), os.environ.get("PYTHONPATH", "")])
    done = start(
        KVSTORE__EVENTS__ENDPOINT="tcp://127.0.0.1:0", PYTHONPATH=path,
        KVSTORE__SERVER__STATE_DIRECTORY=str(tmp_path / "state"), XDG_RUNTIME_DIR=str(tmp_path / "x"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "kvstore[events]" in done.stderr
