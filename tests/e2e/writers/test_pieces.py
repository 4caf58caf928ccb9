"""Stores written as the engine goes: layer by layer, prefill by prefill, from pages."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, Durability, Exactness, Paged, connect
from kvstore_client.planes.shared_memory.mapped import CALL_FILLS_MAX
from kvstore_client.store import calls, gathering
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from kvstore.seams.jobs import begun
from kvstore.spec import LayerSpec
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.writers.prompts import COUNT, SPEC, STEP, assert_stored, fresh
from tests.specs import bits, random_cache, small_spec, tokens_of


def test_layer_by_layer(client: Client) -> None:
    tokens, cache = fresh()
    with client.start_store(SPEC, tokens) as writer:
        assert writer.wanted_token_count == COUNT
        for layer, pair in enumerate(cache):
            assert client.lookup(SPEC, tokens).prefix_token_count == 0
            writer.put_layer(layer, pair)
        receipt = writer.commit()
    assert receipt.stored_token_count == COUNT
    assert_stored(client, tokens, cache)
    with client.start_store(SPEC, tokens) as again:
        assert again.wanted_token_count == 0


def test_a_store_says_where_what_it_lacks_begins(client: Client) -> None:
    tokens, cache = fresh()
    with client.start_store(SPEC, tokens) as writer:
        assert writer.wanted_token_start == 0
    client.store(SPEC, tokens[:STEP], [(k[:, :STEP], v[:, :STEP]) for k, v in cache]).wait(10.0)
    with client.start_store(SPEC, tokens) as writer:
        assert writer.wanted_token_start == STEP
    client.store(SPEC, tokens, cache).wait(10.0)
    with client.start_store(SPEC, tokens) as writer:
        assert writer.wanted_token_start == COUNT


@pytest.mark.parametrize("piece", [1, 5, STEP, 3 * STEP + 2])
def test_a_chunked_prefill_in_pieces_of_any_size(client: Client, piece: int) -> None:
    tokens, cache = fresh()
    with client.start_store(SPEC, tokens) as writer:
        for start in range(0, COUNT, piece):
            for layer, (k, v) in enumerate(cache):
                writer.put_layer(layer, (k[:, start : start + piece], v[:, start : start + piece]), token_start=start)
        assert writer.commit().stored_token_count == COUNT
    assert_stored(client, tokens, cache)


@pytest.mark.parametrize("mla", [False, True], ids=["heads", "blocks of tokens"])
def test_strips_too_large_for_one_message_go_in_several(
    client: Client, monkeypatch: pytest.MonkeyPatch, mla: bool
) -> None:
    """gRPC takes 64 MiB, and a layer of a long chunk may have more: here it is one strip that is too much."""
    monkeypatch.setattr(gathering, "FILL_BYTES_MAX", 1)
    heads = 1 if mla else 3
    layers = (LayerSpec(kv_heads=heads, k_dim=8, v_dim=4),) * 2
    spec = small_spec(model_id=f"long, mla: {mla}", layers=layers, chunk_tokens=200, mla=mla)
    tokens, cache = tokens_of(300, 77 + mla), random_cache(spec, 300, 77)
    session, sent = client.connect_now(), []
    fill = session.fill
    monkeypatch.setattr(session, "fill", lambda name, fills, *rest: (sent.extend(fills), fill(name, fills, *rest)))
    with client.start_store(spec, tokens) as writer:
        for layer, pair in enumerate(cache):
            writer.put_layer(layer, pair)
        assert writer.commit().stored_token_count == 300
    assert len(sent) == 2 * 6
    for found, stored in zip(client.fetch(spec, tokens), cache, strict=True):
        assert all((bits(ours) == bits(theirs)).all() for ours, theirs in zip(found, stored, strict=True))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("kv page slot head dim", (2, 9, 16, 2, 8)),
        ("page kv head slot dim", (9, 2, 2, 16, 8)),
        ("page head slot dim", (9, 2, 16, 16)),
    ],
)
def test_from_pages_in_any_order(client: Client, layout: str, shape: tuple[int, ...]) -> None:
    tokens, cache = fresh()
    pages = np.random.default_rng(1).permutation(9)
    slots = np.concatenate([page * 16 + np.arange(16) for page in pages])[:COUNT]
    with client.start_store(SPEC, tokens) as writer:
        for layer, (k, v) in enumerate(cache):
            pool = np.zeros(shape, np.uint16)
            order = layout.split()
            view = pool.transpose(
                [order.index(name) for name in ("kv", "page", "slot", "head", "dim") if name in order]
            )
            planes = (view[0], view[1]) if "kv" in order else (view[..., :8], view[..., 8:])
            for plane, values in zip(planes, (k, v), strict=True):
                plane[slots // 16, slots % 16] = bits(values).transpose(1, 0, 2)
            for start in (0, 37):
                part = slots[start : 37 if start == 0 else None]
                writer.put_layer(layer, Paged([pool], part, layout), token_start=start)
        assert writer.commit().stored_token_count == COUNT
    assert_stored(client, tokens, cache)


def test_a_chunk_without_all_of_its_strips_is_not_stored(client: Client) -> None:
    tokens, cache = fresh()
    with client.start_store(SPEC, tokens) as writer:
        for layer, (k, v) in enumerate(cache):
            stop = COUNT if layer == 0 else 3 * STEP + 1
            writer.put_layer(layer, (k[:, :stop], v[:, :stop]))
        assert writer.commit().stored_token_count == 3 * STEP
    assert_stored(client, tokens, cache, 3 * STEP)


def test_hidden_states(client: Client) -> None:
    tokens, cache = fresh()
    x = np.random.default_rng(3).integers(0, 1 << 16, (COUNT, SPEC.hidden_size), np.uint16)
    with client.start_store(SPEC, tokens, hidden_layers=[1]) as writer:
        writer.put_hidden(1, x[:10])
        for layer, pair in enumerate(cache):
            writer.put_layer(layer, pair)
        writer.put_hidden(1, x[10:], token_start=10)
        assert writer.commit().stored_token_count == COUNT
    found = client.fetch(SPEC, tokens, hidden_layers=[1], verify=True)
    assert np.array_equal(bits(found.hidden[1]), x)


def test_leaving_without_a_commit_aborts(client: Client) -> None:
    tokens, cache = fresh()
    with client.start_store(SPEC, tokens) as writer:
        writer.put_layer(0, cache[0])
    with client.start_store(SPEC, tokens) as writer:
        for layer, pair in enumerate(cache):
            writer.put_layer(layer, pair)
        assert writer.commit().stored_token_count == COUNT, "nothing of the first is in the way"


def test_what_does_not_fit_is_said(client: Client) -> None:
    tokens, cache = fresh()
    k, v = cache[0]
    with client.start_store(SPEC, tokens) as writer:
        for said, layer, pair, options in (
            ("layer 7", 7, (k, v), {}),
            ("tokens 90..", 0, (k, v), {"token_start": 90}),
            ("pair", 0, k, {}),
            ("shape", 0, (k, v[:, 1:]), {}),
            ("heads", 0, (k, v), {"heads": (0, 9)}),
            ("shape", 0, (k, v), {"heads": (0, 1)}),
        ):
            with pytest.raises(InvalidRequest, match=said):
                writer.put_layer(layer, pair, **options)  # type: ignore[arg-type]
        writer.put_layer(0, (k[:, :20], v[:, :20]))
        with pytest.raises(InvalidRequest, match="put before"):
            writer.put_layer(0, (k[:, 19:], v[:, 19:]), token_start=19)
        writer.commit()
        with pytest.raises(InvalidRequest, match="committed or aborted"):
            writer.put_layer(1, cache[1])
    with pytest.raises(InvalidRequest, match="ticket"):
        client.join_store(b"no ticket", 1)


def test_a_writers_ticket_of_no_known_exactness_is_refused(client: Client) -> None:
    with client.start_store(SPEC, fresh()[0], shards=2) as writer:
        ticket = pb.SharedStore.FromString(writer.ticket)
        ticket.exactness = 9  # type: ignore[assignment]  # of another release, or of nobody's
        with pytest.raises(InvalidRequest, match="ticket"):
            client.join_store(ticket.SerializeToString(), 1, exactness=Exactness.EXACT)


def test_a_token_without_a_slot_is_refused(client: Client) -> None:
    """Engines pad their slots with -1: what lies in the last page is not that token's."""
    tokens, _ = fresh()
    pool = np.zeros((2, 9, 16, 2, 8), np.uint16)
    slots = np.arange(COUNT)
    for place in (0, 20, COUNT - 1):
        padded = slots.copy()
        padded[place] = -1
        with client.start_store(SPEC, tokens) as writer:
            with pytest.raises(InvalidRequest, match="slots"):
                writer.put_layer(0, Paged([pool], padded, "kv page slot head dim"))
            for layer in range(len(SPEC.layers)):
                writer.put_layer(layer, Paged([pool], slots, "kv page slot head dim"))
            writer.abort()


def test_heads_that_came_together_do_so_for_all_tokens_of_a_chunk(client: Client) -> None:
    tokens, cache = fresh()
    k, v = cache[0]
    with client.start_store(SPEC, tokens) as writer:
        writer.put_layer(0, (k[:1, :STEP], v[:1, :STEP]), heads=(0, 1))
        with pytest.raises(InvalidRequest, match="the same heads together"):
            writer.put_layer(0, (k[:, :STEP], v[:, :STEP]))
        writer.put_layer(0, (k[:, STEP : STEP + 3], v[:, STEP : STEP + 3]), token_start=STEP)
        with pytest.raises(InvalidRequest, match="the same heads together"):
            writer.put_layer(0, (k[1:, STEP + 3 :], v[1:, STEP + 3 :]), heads=(1, 2), token_start=STEP + 3)


def test_heads_that_were_refused_for_one_chunk_decide_nothing_for_another(client: Client) -> None:
    tokens, cache = fresh()
    k, v = cache[0]
    with client.start_store(SPEC, tokens) as writer:
        writer.put_layer(0, (k[:1, STEP:], v[:1, STEP:]), heads=(0, 1), token_start=STEP)
        with pytest.raises(InvalidRequest, match="the same heads together"):
            writer.put_layer(0, (k, v))  # nothing was put yet of its first chunk, and nothing is now
        writer.put_layer(0, (k[:1, :STEP], v[:1, :STEP]), heads=(0, 1))
        writer.put_layer(0, (k[1:], v[1:]), heads=(1, 2))
        for layer, pair in enumerate(cache[1:], start=1):
            writer.put_layer(layer, pair)
        assert writer.commit().stored_token_count == COUNT
    assert_stored(client, tokens, cache)


def test_more_than_staging_holds_goes_in_pieces() -> None:
    small = Sidecar("--capacity", "64 MiB")
    small.environment = {**os.environ, "KVSTORE__LIMITS__STAGING_BYTES_MAX": "256 KiB"}
    with small:
        with connect(small.address) as client:
            count = 200 * STEP
            tokens, cache = tokens_of(count, seed=5), random_cache(SPEC, count)
            with client.start_store(SPEC, tokens) as writer:
                for start in range(0, count, 10 * STEP):
                    for layer, (k, v) in enumerate(cache):
                        part = slice(start, start + 10 * STEP)
                        writer.put_layer(layer, (k[:, part], v[:, part]), token_start=start)
                receipt = writer.commit()
            assert receipt.stored_token_count == count, receipt.reason
            assert_stored(client, tokens, cache, count)


def test_without_a_sidecar_nothing_raises(tmp_path: Any) -> None:
    with connect(f"unix://{tmp_path}/none.sock", required=False) as client:
        tokens, cache = fresh()
        with client.start_store(SPEC, tokens, shards=2) as writer:
            assert (writer.wanted_token_count, writer.ticket) == (0, b"")
            writer.put_layer(0, cache[0])
            receipt = writer.commit()
        assert receipt.wait(5.0) is Durability.NONE
        assert "no sidecar answers" in receipt.reason


def test_a_session_that_ends_while_a_store_begins_fails_the_store(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle_of = calls.settle_of

    def ends(*arguments: Any) -> Any:
        client.connect_now().close()
        return settle_of(*arguments)

    tokens, cache = fresh()
    monkeypatch.setattr(calls, "settle_of", ends)
    with client.start_store(SPEC, tokens) as writer:
        writer.put_layer(0, cache[0])
        assert writer.commit().wait(5.0) is Durability.NONE
    assert "gone" in writer.failure


def test_many_pieces_that_wait_together_fit_into_the_smallest_messages() -> None:
    """One call for all of them would be larger than the sidecar takes."""
    count = 40 * STEP
    spec = small_spec(layers=SPEC.layers * 2)
    tokens, cache = tokens_of(count, 11), random_cache(spec, count, 11)
    environment = {**os.environ, "KVSTORE__LIMITS__MESSAGE_BYTES_MAX": "4096"}
    with Sidecar("--capacity", "16 MiB", environment=environment) as small, connect(small.address) as client:
        waits = threading.Event()
        begun(client._context.committer, waits.wait, 60.0)  # what is put meanwhile goes together
        with client.start_store(spec, tokens) as writer:
            for layer, (k, v) in enumerate(cache):
                for head in range(k.shape[0]):
                    heads = slice(head, head + 1)
                    writer.put_layer(layer, (k[heads], v[heads]), heads=(head, head + 1))
            assert len(writer._whole) > 2 * CALL_FILLS_MAX
            waits.set()
            assert writer.commit().stored_token_count == count
        assert_stored(client, tokens, cache, count, spec)
