"""Stores of several writers: threads and processes, that agree or do not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, Durability, Receipt, connect
from kvstore_client.copying import copy
from kvstore_client.planes.store import StagingRun
from kvstore_client.store.gathering import Pile, StripRange, strip_range
from kvstore_ops.sidecar import Sidecar

from kvstore.chunk import layout_of
from kvstore.errors import InvalidRequest
from kvstore.spec import LayerSpec
from tests.conftest import CLIENTS
from tests.e2e.writers.prompts import COUNT, SPEC, STEP, assert_stored, fresh
from tests.server.raw import eventually
from tests.specs import bits, random_cache, small_spec, tokens_of

RANK = """
import sys
from tests.specs import random_cache, small_spec
from kvstore_client import connect
address, ticket, count, end = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
cache = random_cache(small_spec(), count)
with connect(address) as client:
    writer = client.join_store(ticket, 1)
    for layer, (k, v) in enumerate(cache):
        if end != "die" or layer == 0:
            writer.put_layer(layer, (k[1:2], v[1:2]), heads=(1, 2))
    print("put", flush=True)
    if end == "commit":
        print(writer.commit().stored_token_count, flush=True)
    if end == "abort":
        writer.abort()
    if end == "die":
        sys.stdin.read()
"""


def rank(sidecar: Sidecar, ticket: bytes, end: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RANK, sidecar.address, ticket.hex(), str(COUNT), end]
    return CLIENTS.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("end", ["commit", "abort", "die"])
def test_two_ranks_in_two_processes(sidecar: Sidecar, client: Client, end: str) -> None:
    """TP 2 stores, TP 1 reads; when one rank aborts or dies nothing is stored, and nothing is left."""
    tokens, cache = fresh()
    with client.start_store(SPEC, tokens, shards=2) as writer:
        other = rank(sidecar, writer.ticket, end)
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "put\n"
            for layer, (k, v) in enumerate(cache):
                writer.put_layer(layer, (k[:1], v[:1]), heads=(0, 1))
            receipt = writer.commit()
            if end == "die":
                assert not receipt.is_done
                other.kill()
            stored = receipt.stored_token_count
            if end == "commit":
                assert int(other.stdout.readline()) == stored == COUNT
            else:
                assert stored == 0
                assert client.lookup(SPEC, tokens).prefix_token_count == 0
        finally:
            other.kill()
            other.communicate(timeout=20)
    if end == "commit":
        assert_stored(client, tokens, cache)


@pytest.mark.parametrize("stored_by", [1, 2, 4])
def test_what_so_many_ranks_stored_any_other_number_reads(client: Client, stored_by: int) -> None:
    """In strips of 32 KiB: what is put for one lies right behind another's."""
    spec = small_spec(model_id="four heads", layers=(LayerSpec(kv_heads=4, k_dim=512, v_dim=512),) * 2)
    tokens, cache = tokens_of(COUNT, seed=900 + stored_by), random_cache(spec, COUNT, stored_by)
    first = client.start_store(spec, tokens, shards=stored_by)
    writers = [first, *(client.join_store(first.ticket, shard) for shard in range(1, stored_by))]
    for writer, heads in zip(writers, shares(4, stored_by), strict=True):
        for layer, pair in enumerate(cache):
            writer.put_layer(layer, tuple(plane[heads.start : heads.stop] for plane in pair), heads=heads)
    assert [each.stored_token_count for each in [writer.commit() for writer in writers]] == [COUNT] * stored_by
    ticket = client.lookup(spec, tokens, hold=True, readers=1 + 2 + 4).ticket
    assert ticket is not None
    for heads in (*shares(4, 1), *shares(4, 2), *shares(4, 4)):
        transfer = client.start_fetch(ticket, heads=heads, verify=True)
        for layer, pair in enumerate(cache):
            for found, said in zip(transfer.wait_layer(layer, 10.0), pair, strict=True):
                assert np.array_equal(bits(found), said[heads.start : heads.stop])
        transfer.wait(10.0)


@pytest.mark.parametrize("heads", [range(1), range(1, 3), range(3, 4), range(4)], ids=str)
def test_strips_are_gathered_in_their_own_room(heads: range) -> None:
    spec = small_spec(layers=(LayerSpec(kv_heads=4, k_dim=8, v_dim=8),) * 2)
    layout, strips = layout_of(spec, spec.kind, STEP), StripRange(0, 1, heads.start, heads.stop)
    first, count = strip_range(layout, strips)
    size = int(layout.strip_offsets[first + count - 1] + layout.strip_lengths[first] - layout.strip_offsets[first])
    staging = np.full(1 << 16, 0xDB, np.uint8)
    pile = Pile(strips, layout, StagingRun(1, 4096, size, staging))
    for part in pile.parts:
        assert part.array.shape == (1, len(heads), STEP, 8)
        part.array[...] = 0
    assert not staging[4096 : 4096 + size].any()
    assert (np.delete(staging, slice(4096, 4096 + size)) == 0xDB).all()
    with pytest.raises(AssertionError):
        copy(np.zeros((2, 3)), np.zeros((1, 3)))


def shares(heads: int, ranks: int) -> list[range]:
    """Each rank's heads."""
    return [range(rank * heads // ranks, (rank + 1) * heads // ranks) for rank in range(ranks)]


def test_threads_of_one_process_may_be_shards(client: Client) -> None:
    """Layers instead of heads, the ranks in one process: the first commit waits in the background."""
    tokens, cache = fresh()
    first = client.start_store(SPEC, tokens, shards=len(cache))
    writers = [first, *(client.join_store(first.ticket, shard) for shard in range(1, len(cache)))]
    for layer, writer in enumerate(writers):
        writer.put_layer(layer, cache[layer])
    receipts = [writer.commit() for writer in writers]
    assert [each.stored_token_count for each in receipts] == [COUNT] * len(cache)
    assert_stored(client, tokens, cache)


def test_ranks_that_disagree_are_told(sidecar: Sidecar, client: Client) -> None:
    from kvstore.v1 import cache_pb2 as pb
    from kvstore.wire import spec_to_message

    tokens, _ = fresh()
    with client.start_store(SPEC, tokens, shards=2) as writer:
        message = pb.SharedStore.FromString(writer.ticket)
        message.spec.CopyFrom(spec_to_message(small_spec(model_id="another")))
        with pytest.raises(InvalidRequest, match="spec differs"):
            client.join_store(message.SerializeToString(), 1)
        with pytest.raises(InvalidRequest, match=r"1\.\.1"):
            client.join_store(writer.ticket, 2)
        ticket = writer.ticket
    client.store(SPEC, tokens_of(STEP, seed=77), random_cache(SPEC, STEP)).wait(5.0)  # after the abort
    with pytest.raises(InvalidRequest, match="was committed or aborted"):
        client.join_store(ticket, 1)


def test_stores_that_wait_for_each_other_share_a_client(client: Client) -> None:
    """The second has chunks that the first is still writing, and commits before it."""
    tokens, cache = fresh()
    longer = np.concatenate([tokens[: 2 * STEP], tokens_of(STEP, seed=4)])
    first = client.start_store(SPEC, tokens)
    second = client.start_store(SPEC, longer)
    assert second.wanted_token_count == STEP
    for layer, (k, v) in enumerate(cache):
        second.put_layer(layer, (k[:, : 3 * STEP], v[:, : 3 * STEP]))
    early = second.commit()
    for layer, pair in enumerate(cache):
        first.put_layer(layer, pair)
    assert first.commit().stored_token_count == COUNT
    assert early.stored_token_count == 3 * STEP


@pytest.mark.parametrize("shards", [1, 2])
def test_a_client_that_is_closed_finishes_the_commit_that_waits_for_others(
    sidecar: Sidecar, client: Client, shards: int
) -> None:
    """For another store's chunks, or for another shard: without it that one's would be lost, too."""
    tokens, cache = fresh()
    first = client.start_store(SPEC, tokens if shards == 2 else tokens[: 2 * STEP], shards=shards)

    def put_and_commit() -> None:
        for layer, (k, v) in enumerate(cache):
            pair = (k[:1], v[:1]) if shards == 2 else (k[:, : 2 * STEP], v[:, : 2 * STEP])
            first.put_layer(layer, pair, heads=(0, 1) if shards == 2 else None)
        receipts.append(first.commit())

    receipts: list[Receipt] = []
    with connect(sidecar.address) as other:
        if shards == 2:
            second = other.join_store(first.ticket, 1)
            for layer, (k, v) in enumerate(cache):
                second.put_layer(layer, (k[1:], v[1:]), heads=(1, 2))
            receipts.append(second.commit())
        else:
            receipts.append(other.store(SPEC, tokens, cache))
        late = threading.Timer(0.5, put_and_commit)
        late.start()
    late.join()
    assert receipts[0].is_done
    assert [each.stored_token_count for each in receipts] == [COUNT, COUNT if shards == 2 else 2 * STEP]
    assert_stored(client, tokens, cache)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_sidecar_that_dies_between_two_puts(shards: int) -> None:
    tokens, cache = fresh()
    with Sidecar("--capacity", "32 MiB") as sidecar, connect(sidecar.address) as client:
        writer = client.start_store(SPEC, tokens, shards=shards)
        writer.put_layer(0, cache[0])
        sidecar.stop(kill=True)
        time.sleep(0.2)
        writer.put_layer(1, cache[1])
        assert writer.commit().wait(30.0) is Durability.NONE


def test_what_was_left_out_of_a_store_is_said(client: Client) -> None:
    spec, tokens = small_spec(model_id="left out"), tokens_of(32)
    with client.start_store(spec, tokens) as writer:
        writer.put_layer(0, random_cache(spec, 32)[0])
        receipt = writer.commit()
        assert receipt.wait(10.0) is Durability.NONE
        assert "never written: put every layer and head of it" in receipt.reason


@pytest.mark.parametrize("count", [0, -1, 1025, 1 << 40, 1.5, "2", None, True], ids=repr)
def test_a_number_of_writers_or_readers_that_is_none_is_refused_by_name(client: Client, count: Any) -> None:
    tokens, _ = fresh()
    with pytest.raises(InvalidRequest, match=r"shards must be .* 1\.\.1024"):
        client.start_store(SPEC, tokens, shards=count)
    with pytest.raises(InvalidRequest, match=r"readers must be .* 1\.\.1024"):
        client.lookup(SPEC, tokens, hold=True, readers=count)


def test_a_limit_gives_a_writer_that_says_so_and_a_hold_of_what_there_is_room_for() -> None:
    tight = Sidecar("--capacity", "32 MiB")
    names = ("KVSTORE__LIMITS__RESERVATION_COUNT_MAX", "KVSTORE__LIMITS__TICKET_COUNT_MAX")
    tight.environment = {**os.environ, **dict.fromkeys(names, "1")}
    with tight, connect(tight.address) as client, connect(tight.address) as other:
        with client.start_store(SPEC, tokens_of(STEP, 1), shards=2) as first:
            with other.start_store(SPEC, tokens_of(STEP, 2)), other.join_store(first.ticket, 1) as second:
                assert "reservation_count_max" in second.commit().reason
        tokens, cache = tokens_of(COUNT, 3), random_cache(SPEC, COUNT)
        client.store(SPEC, tokens, cache).wait(10.0)
        longer = np.concatenate([tokens, tokens_of(3, 4)])
        session = client.connect_now()
        shown, session.presence = session.presence, None
        match = client.lookup(SPEC, longer, hold=True)
        assert match.prefix_token_count == 5 * STEP, "its partial chunk takes a second ticket for a moment"
        assert match.ticket is not None
        transfer = client.start_fetch(match.ticket)
        transfer.wait(10.0)
        assert np.array_equal(bits(transfer.wait_layer(0)[0]), bits(cache[0][0])[:, : 5 * STEP])
        assert client.stats().sessions.ticket_count == 0
        session.presence = shown
        eventually(lambda: bool(client.peek(SPEC, longer)))
        match = client.lookup(SPEC, longer, hold=True)
        assert match.prefix_token_count == COUNT, "shared memory shows the partial chunk: one ticket is enough"
        client.release_ticket(match.ticket)
