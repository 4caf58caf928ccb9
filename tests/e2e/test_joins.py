"""A decode process fetches a prompt that its prefill process is still storing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, Paged, Transfer, connect
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import DataLoss, DeadlineExceeded, KVStoreError
from tests.conftest import CLIENTS
from tests.server.raw import TIMEOUT_S
from tests.specs import bits, random_cache, small_spec, tokens_of

SPEC = small_spec()
STEP = SPEC.chunk_tokens
COUNT = 4 * STEP + 5
LAYERS = range(SPEC.layer_count)


@pytest.fixture(scope="module")
def sidecar() -> Any:
    """Local: the remote plane sends what can be checked, so what is committed."""
    with Sidecar("--capacity", "64 MiB") as running:
        yield running


@pytest.fixture
def prefill(sidecar: Sidecar) -> Any:
    with connect(sidecar.address) as client:
        yield client


@pytest.fixture
def decode(sidecar: Sidecar) -> Any:
    with connect(sidecar.address) as client:
        yield client
        until = time.monotonic() + TIMEOUT_S
        while left(client) and time.monotonic() < until:  # leases are given back beside the caller
            time.sleep(0.01)
        assert left(client) == 0


def left(client: Client) -> int:
    stats = client.stats()
    return (
        stats.sessions.reservation_count
        + stats.sessions.lease_count
        + stats.sessions.stream_count
        + stats.arena.reserved_bytes
    )


def fresh() -> tuple[Any, Any]:
    return tokens_of(COUNT, seed=int(np.random.default_rng().integers(1 << 31))), random_cache(SPEC, COUNT)


def room() -> list[tuple[Any, Any]]:
    return [tuple(np.zeros_like(bits(each)) for each in pair) for pair in random_cache(SPEC, COUNT)]  # type: ignore[misc]


def assert_layer(into: Any, cache: Any, layer: int) -> None:
    for one, other in zip(into[layer], cache[layer], strict=True):
        assert np.array_equal(one, bits(other))


def is_waiting(transfer: Transfer) -> bool:
    """Return True when the transfer is still not done a good while later."""
    with pytest.raises(DeadlineExceeded):
        transfer.wait(0.3)
    return not transfer.is_done


@pytest.mark.parametrize("verify", [False, True])
def test_layers_come_as_they_are_put_and_count_with_the_commit(prefill: Client, decode: Client, verify: bool) -> None:
    tokens, cache = fresh()
    into = room()
    with prefill.start_store(SPEC, tokens) as writer:
        transfer = decode.start_fetch(writer.ticket, into=into, verify=verify)
        for layer in LAYERS:
            assert transfer.poll() == layer
            writer.put_layer(layer, cache[layer])
            transfer.wait_layer(layer, 10.0)
            assert_layer(into, cache, layer)
        assert is_waiting(transfer), "it is provisional until the commit"
        assert decode.lookup(SPEC, tokens).prefix_token_count == 0
        receipt = writer.commit()
    transfer.wait(10.0)
    assert transfer.good_token_count == receipt.stored_token_count == COUNT
    for layer in LAYERS:
        assert_layer(into, cache, layer)


def test_into_pages_with_one_head_while_a_prefill_goes_on(prefill: Client, decode: Client) -> None:
    tokens, cache = fresh()
    pages = [np.zeros((2, 5, 16, 1, 8), np.uint16) for _ in LAYERS]
    with prefill.start_store(SPEC, tokens) as writer:
        transfer = decode.start_fetch(writer.ticket, into=Paged(pages, np.arange(COUNT)), heads=(1, 2))
        for start in range(0, COUNT, 20):
            for layer, (k, v) in enumerate(cache):
                writer.put_layer(layer, (k[:, start : start + 20], v[:, start : start + 20]), token_start=start)
        writer.commit()
    transfer.wait(10.0)
    for layer in LAYERS:
        for which in range(2):
            got = pages[layer][which].reshape(80, 8)[:COUNT]
            assert np.array_equal(got, bits(cache[layer][which])[1])


@pytest.mark.parametrize("many", [1, 3])
def test_a_store_that_is_aborted_is_nothing(prefill: Client, decode: Client, many: int) -> None:
    tokens, cache = fresh()
    with prefill.start_store(SPEC, tokens) as writer:
        transfers = [decode.start_fetch(writer.ticket, into=room()) for _ in range(many)]
        for layer in LAYERS:
            writer.put_layer(layer, cache[layer])
        for transfer in transfers:
            transfer.wait_layer(0, 10.0)
    for transfer in transfers:
        with pytest.raises(DataLoss):
            transfer.wait(10.0)
        assert transfer.failed
        assert transfer.good_token_count < COUNT
    assert decode.lookup(SPEC, tokens).prefix_token_count == 0


PREFILL = """
import sys
from tests.specs import random_cache, small_spec, tokens_of
from kvstore_client import connect
address, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with connect(address) as client:
    writer = client.start_store(small_spec(), tokens_of(count, seed=seed))
    writer.put_layer(0, random_cache(small_spec(), count)[0])
    print(writer.ticket.hex(), flush=True)
    sys.stdin.read()
"""


def test_the_writer_dies(sidecar: Sidecar, decode: Client) -> None:
    command = [sys.executable, "-c", PREFILL, sidecar.address, str(os.getpid()), str(COUNT)]
    process = CLIENTS.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ticket = bytes.fromhex(process.stdout.readline())
        transfer = decode.start_fetch(ticket, into=room())
        transfer.wait_layer(0, 10.0)
    finally:
        process.kill()
        process.communicate(timeout=20)
    with pytest.raises(DataLoss):
        transfer.wait(10.0)


def test_who_comes_late_fetches_what_is_stored(prefill: Client, decode: Client) -> None:
    tokens, cache = fresh()
    into = room()
    with prefill.start_store(SPEC, tokens) as writer:
        for layer in LAYERS:
            writer.put_layer(layer, cache[layer])
        writer.commit().wait(10.0)
        transfer = decode.start_fetch(writer.ticket, into=into)
        transfer.wait(10.0)
    for layer in LAYERS:
        assert_layer(into, cache, layer)


def test_who_comes_after_an_abort_is_told(prefill: Client, decode: Client) -> None:
    tokens, _ = fresh()
    with prefill.start_store(SPEC, tokens) as writer:
        pass
    transfer = decode.start_fetch(writer.ticket, into=room())
    with pytest.raises(DataLoss, match="COLD"):
        transfer.wait(10.0)


def test_a_cancelled_reader_leaves_the_store_alone(prefill: Client, decode: Client) -> None:
    tokens, cache = fresh()
    with prefill.start_store(SPEC, tokens) as writer:
        transfer = decode.start_fetch(writer.ticket, into=room())
        writer.put_layer(0, cache[0])
        transfer.wait_layer(0, 10.0)
        transfer.cancel()
        for layer in LAYERS[1:]:
            writer.put_layer(layer, cache[layer])
        assert writer.commit().stored_token_count == COUNT
    assert transfer.cancel(10.0)


def test_a_store_that_continues_what_the_device_has() -> None:
    """The first chunks are cold, the others are being written: one transfer brings both."""
    tokens, cache = fresh()
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB") as sidecar:
        with connect(sidecar.address) as client:
            first = 2 * STEP
            client.store(SPEC, tokens[:first], [(k[:, :first], v[:, :first]) for k, v in cache]).wait(10.0)
        sidecar.stop()
        sidecar.start()
        with connect(sidecar.address) as prefill, connect(sidecar.address) as decode:
            into = room()
            with prefill.start_store(SPEC, tokens) as writer:
                assert writer.wanted_token_count == COUNT - first
                transfer = decode.start_fetch(writer.ticket, into=into, verify=True)
                for layer in LAYERS:
                    writer.put_layer(layer, cache[layer])
                writer.commit()
            transfer.wait(10.0)
            for layer in LAYERS:
                assert_layer(into, cache, layer)


def test_a_store_that_never_ends_is_ended() -> None:
    sidecar = Sidecar("--capacity", "32 MiB")
    sidecar.environment = {**os.environ, "KVSTORE__LIMITS__RESERVATION_AGE_S_MAX": "1"}
    with sidecar, connect(sidecar.address) as prefill, connect(sidecar.address) as decode:
        tokens, cache = fresh()
        writer = prefill.start_store(SPEC, tokens)
        transfer = decode.start_fetch(writer.ticket, into=room())
        writer.put_layer(0, cache[0])
        with pytest.raises(KVStoreError):
            transfer.wait(30.0)
        assert writer.commit().stored_token_count == 0


def test_by_the_remote_plane_layers_come_with_the_commit() -> None:
    tokens, cache = fresh()
    with Sidecar("--capacity", "32 MiB", plane="remote") as sidecar:
        with connect(sidecar.address) as prefill, connect(sidecar.address) as decode:
            into = room()
            with prefill.start_store(SPEC, tokens) as writer:
                transfer = decode.start_fetch(writer.ticket, into=into)
                for layer in LAYERS:
                    writer.put_layer(layer, cache[layer])
                assert transfer.poll() == 0
                assert writer.commit().stored_token_count == COUNT
            transfer.wait(10.0)
            for layer in LAYERS:
                assert_layer(into, cache, layer)
            aborted = prefill.start_store(SPEC, fresh()[0])
            transfer = decode.start_fetch(aborted.ticket, into=into)
            aborted.abort()
            with pytest.raises(KVStoreError):
                transfer.wait(10.0)


def test_a_chunk_of_another_store_that_was_committed_meanwhile(prefill: Client, decode: Client) -> None:
    tokens, cache = fresh()
    head = 2 * STEP
    into = room()
    first = prefill.start_store(SPEC, tokens[:head])
    with prefill.start_store(SPEC, tokens) as writer:
        for layer, (k, v) in enumerate(cache):
            first.put_layer(layer, (k[:, :head], v[:, :head]))
        assert first.commit().stored_token_count == head
        transfer = decode.start_fetch(writer.ticket, into=into)
        for layer in LAYERS:
            writer.put_layer(layer, cache[layer])
        assert writer.commit().stored_token_count == COUNT
    transfer.wait(10.0)
    for layer in LAYERS:
        assert_layer(into, cache, layer)


def test_a_store_with_hidden_states_is_joined_for_its_cache(prefill: Client, decode: Client) -> None:
    tokens, cache = fresh()
    into = room()
    with prefill.start_store(SPEC, tokens, hidden_layers=[1]) as writer:
        transfer = decode.start_fetch(writer.ticket, into=into)
        for layer in LAYERS:
            writer.put_layer(layer, cache[layer])
        writer.put_hidden(1, np.zeros((COUNT, SPEC.hidden_size), np.uint16))
        assert writer.commit().stored_token_count == COUNT
    transfer.wait(10.0)
    for layer in LAYERS:
        assert_layer(into, cache, layer)
