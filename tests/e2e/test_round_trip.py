"""Stored = fetched, to the bit, through a real server; and never a hit for another cache."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstore_client import Client, Extra, connect_async
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from kvstore.spec import DTYPES, ChunkState, Durability, Exactness, LayerSpec, MissReason
from tests.specs import bits, odd_spec, random_cache, small_spec, tokens_of


def assert_same(fetched: Any, kv: list[Any], layers: list[int], count: int, heads: slice = slice(None)) -> None:
    for (k, v), layer in zip(fetched, layers, strict=True):
        assert (bits(k) == kv[layer][0][heads, :count]).all()
        assert (bits(v) == kv[layer][1][heads, :count]).all()


EXAMPLES = itertools.count()


@given(data=st.data())
def test_stored_is_fetched_to_the_bit(client: Client, data: st.DataObject) -> None:
    mla = data.draw(st.booleans())
    chunk_tokens = data.draw(st.sampled_from([1, 16, 100]))
    spec = odd_spec(
        data.draw(st.sampled_from(sorted(DTYPES))), data.draw(st.sampled_from([1, 2, 5])),
        data.draw(st.sampled_from([8, 80])), data.draw(st.sampled_from([3, 64])), chunk_tokens, mla=mla,
    )  # fmt: skip
    count = data.draw(st.integers(1, 3 * chunk_tokens + 2))
    seed = data.draw(st.integers(0, 10**6))
    tokens, kv = tokens_of(count, seed), random_cache(spec, count, seed)
    extras = [Extra(0, str(next(EXAMPLES)).encode())]  # what an earlier example stored is not this one's
    hidden = {1: np.random.default_rng(seed).integers(0, 65535, (count, spec.hidden_size), dtype=np.uint16)}
    receipt = client.store(spec, tokens, kv, hidden=hidden, extras=extras)
    assert receipt.wait(10.0) is Durability.MEMORY
    assert receipt.stored_token_count == count
    layers = list(spec.slab_layers)
    verify = data.draw(st.booleans())
    whole = client.fetch(spec, tokens, hidden_layers=(1,), verify=verify, extras=extras)
    assert whole.token_count == count
    assert whole.reason is MissReason.NONE
    assert_same(whole, kv, layers, count)
    assert (bits(whole.hidden[1]) == hidden[1]).all()
    # A prompt that goes on after what is stored, and one that stops inside it.
    longer = client.fetch(spec, np.append(tokens, [1, 2, 3]), layers=layers[1:], extras=extras)
    assert longer.token_count >= count // chunk_tokens * chunk_tokens
    assert_same(longer, kv, layers[1:], longer.token_count)
    shorter = client.fetch(spec, tokens[: count - 1], extras=extras)
    assert shorter.token_count <= count - 1
    assert_same(shorter, kv, layers, shorter.token_count)
    if not mla:
        heads = spec.layers[0].kv_heads
        start = data.draw(st.integers(0, heads - 1))
        stop = data.draw(st.integers(start + 1, heads))
        part = client.fetch(spec, tokens, heads=range(start, stop), verify=verify, extras=extras)
        assert_same(part, kv, layers, count, slice(start, stop))
    for position, (layer, pair) in enumerate(client.fetch_layers(spec, tokens, extras=extras)):
        assert layer == layers[position]
        assert_same([pair], kv, [layer], count)


def test_a_miss_is_false_and_what_was_stored_can_be_read_in_a_log(client: Client) -> None:
    spec = small_spec(model_id="truth")
    tokens = tokens_of(20, 77)
    assert not client.fetch(spec, tokens)
    assert len(client.fetch(spec, tokens)) == spec.layer_count
    receipt = client.store(spec, tokens, random_cache(spec, 20, 77))
    receipt.wait(20.0)
    assert repr(receipt) == "Receipt(MEMORY, 20 tokens)"
    assert client.fetch(spec, tokens)
    writer = client.start_store(spec, tokens_of(20, 78))
    refused = writer.commit()
    refused.wait(20.0)
    assert repr(refused) == f"Receipt(nothing was kept: {refused.reason})"
    assert refused.reason


def variants() -> dict[str, Any]:
    spec = small_spec()
    layer = LayerSpec(kv_heads=2, k_dim=8, v_dim=8)
    return {
        "weights": {"spec": replace(spec, weights_digest="cd" * 32)},
        "unverified weights": {"spec": replace(spec, weights_digest="unverified:x")},
        "dtype": {"spec": replace(spec, cache_dtype="float16")},
        "lora": {"spec": replace(spec, adapter_id="lora")},
        "layers": {"spec": replace(spec, model_id="other", layers=(layer,) * 3)},
        "extras": {"extras": [Extra(0, b"salt")]},
        "a late extra": {"extras": [Extra(15, b"image")]},
        "provenance of values": {"exactness": Exactness.DERIVED},
    }


@pytest.mark.parametrize("name", variants())
def test_never_a_hit_across(client: Client, name: str) -> None:
    spec, tokens = small_spec(), tokens_of(40, 5)
    client.store(spec, tokens, random_cache(spec, 40)).wait()
    options = {"spec": spec, **variants()[name]}
    other = options.pop("spec")
    assert client.lookup(spec, tokens).prefix_token_count == 40
    assert client.lookup(other, tokens, **options).prefix_token_count == 0
    assert client.fetch(other, tokens, **options).token_count == 0


def test_derived_is_never_exact_and_comes_back_as_derived(client: Client) -> None:
    spec, tokens = small_spec(), tokens_of(32, 6)
    kv = random_cache(spec, 32)
    client.store(spec, tokens, kv, exactness=Exactness.DERIVED).wait()
    assert client.lookup(spec, tokens).prefix_token_count == 0
    assert_same(client.fetch(spec, tokens, exactness=Exactness.DERIVED), kv, [0, 1], 32)


def test_into_the_callers_tensors(client: Client) -> None:
    import torch

    spec, tokens = small_spec(), tokens_of(40, 7)
    kv = random_cache(spec, 40)
    client.store(spec, tokens, kv).wait()
    into = [
        (torch.zeros(2, 64, 8, dtype=torch.bfloat16), torch.zeros(2, 64, 8, dtype=torch.bfloat16)) for _ in range(2)
    ]
    fetched = client.fetch(spec, tokens, into=into)
    assert fetched.token_count == 40
    assert_same([(k[:, :40], v[:, :40]) for k, v in into], kv, [0, 1], 40)
    assert not bits(into[0][0][:, 40:]).any()


@pytest.mark.parametrize("door", ["fetch", "verified", "transfer"])
def test_tensors_whose_items_share_memory_are_refused(client: Client, door: str) -> None:
    """Every head lies where the last one does: what came would be wrong for all others."""
    import torch

    spec, tokens = small_spec(), tokens_of(40, 8)
    client.store(spec, tokens, random_cache(spec, 40)).wait()

    def planes() -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.zeros(2, 40, 8, dtype=torch.bfloat16)
        return own, torch.zeros(1, 40, 8, dtype=torch.bfloat16).expand(2, -1, -1)

    into = [planes(), planes()]
    with pytest.raises(InvalidRequest, match=r"into\[0\] .* share memory"):
        if door == "transfer":
            client.start_fetch_prefix(spec, tokens, into=into).cancel(10.0)
        else:
            client.fetch(spec, tokens, into=into, verify=door == "verified")


def test_arrays_in_steps_that_are_no_whole_items(client: Client) -> None:
    """A field of records: torch cannot share its memory. Stored from as it is, refused to fetch into."""
    import torch  # noqa: F401 - copies are torch's from here on

    spec, tokens = small_spec(), tokens_of(40, 9)
    kv = random_cache(spec, 40)
    k = np.zeros((2, 40, 8), [("kept", np.uint16), ("other", np.uint8)])["kept"]
    k[...] = kv[0][0]
    client.store(spec, tokens, [(k, kv[0][1]), kv[1]]).wait()
    assert_same(client.fetch(spec, tokens), kv, [0, 1], 40)
    with pytest.raises(InvalidRequest, match=r"into\[0\]"):
        client.fetch(spec, tokens, into=[(k, kv[0][1]), kv[1]])


def test_misses_say_why(client: Client) -> None:
    spec = small_spec()
    match = client.lookup(spec, tokens_of(40, 999))
    assert not match
    assert [chunk.reason for chunk in match.chunks] == [MissReason.COLD] * 3
    assert [(chunk.token_start, chunk.token_stop) for chunk in match.chunks] == [(0, 16), (16, 32), (32, 40)]


def test_partial_tails_stay_beside_each_other_and_beside_the_full_chunk(client: Client) -> None:
    spec, tokens = small_spec(weights_digest="ef" * 32), tokens_of(32, 8)
    kv = random_cache(spec, 32)

    def store(count: int) -> None:
        client.store(spec, tokens[:count], [(k[:, :count], v[:, :count]) for k, v in kv]).wait()

    for count in (20, 24, 28):
        store(count)
        assert client.lookup(spec, tokens[:30]).prefix_token_count == count
    store(32)
    for count, found in ((18, 16), (20, 20), (22, 20), (26, 24), (30, 28), (32, 32)):
        assert client.lookup(spec, tokens[:count]).prefix_token_count == found
        assert_same(client.fetch(spec, tokens[:count]), kv, [0, 1], found)
    assert client.stats().counters["superseded_chunks"] == 1 + 2 + 3


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("kv must be one", lambda kv: kv[:1]),
        ("shape", lambda kv: [(k[:, :-1], v) for k, v in kv]),
        ("shape", lambda kv: [(k[:1], v) for k, v in kv]),
        ("cache is bfloat16", lambda kv: [(k.astype(np.float32), v) for k, v in kv]),
        ("pair", lambda kv: [(k,) for k, _ in kv]),
        ("torch tensor or a numpy", lambda kv: [(k.tolist(), v) for k, v in kv]),
    ],
)
def test_a_wrong_cache_is_named(client: Client, argument: str, change: Any) -> None:
    spec = small_spec()
    with pytest.raises(InvalidRequest, match=argument):
        client.store(spec, tokens_of(20), change(random_cache(spec, 20)))


def test_other_wrong_arguments_are_named(client: Client) -> None:
    spec, tokens = small_spec(), tokens_of(20)
    kv = random_cache(spec, 20)
    with pytest.raises(InvalidRequest, match="out of range"):
        client.lookup(spec, [1000])
    with pytest.raises(InvalidRequest, match="hidden\\[9\\]"):
        client.store(spec, tokens, kv, hidden={9: np.zeros((20, 32), np.uint16)})
    with pytest.raises(InvalidRequest, match="layer 5"):
        client.fetch(spec, tokens, layers=[5])
    with pytest.raises(InvalidRequest, match="heads"):
        client.fetch(spec, tokens, heads=(1, 3))
    with pytest.raises(InvalidRequest, match="durability"):
        client.store(spec, tokens, kv, durability=Durability.OBJECT)
    with pytest.raises(InvalidRequest, match="two geometries"):
        client.lookup(replace(spec, hidden_size=64), tokens)
    with pytest.raises(InvalidRequest, match=r"arena\.(capacity|region)_bytes"):
        huge = small_spec(model_id="huge", layers=(LayerSpec(kv_heads=1, k_dim=65536, v_dim=65536),) * 40)
        client.store(huge, tokens_of(16), [(np.zeros((1, 16, 65536), np.uint16),) * 2] * 40).wait()


def test_more_than_the_arena_holds_keeps_the_leading_part(client: Client) -> None:
    """64 MiB of arena, 96 MiB of cache: what is kept is a prefix, and it is right."""
    spec = small_spec(model_id="big", layers=(LayerSpec(kv_heads=8, k_dim=128, v_dim=128),) * 4, chunk_tokens=256)
    count = 256 * 24
    tokens, kv = tokens_of(count, 11), random_cache(spec, count)
    receipt = client.store(spec, tokens, kv)
    assert receipt.wait(20.0) is Durability.MEMORY
    assert 0 < receipt.stored_token_count < count
    assert "arena.capacity_bytes" in receipt.reason
    match = client.lookup(spec, tokens)
    assert match.prefix_token_count == receipt.stored_token_count
    assert MissReason.OVERLOADED in {chunk.reason for chunk in match.chunks}
    fetched = client.fetch(spec, tokens, verify=True)
    assert_same(fetched, kv, [0, 1, 2, 3], match.prefix_token_count)
    stats = client.stats().arena
    assert stats.used_bytes <= stats.capacity_bytes


async def test_asyncio(sidecar: Sidecar) -> None:
    spec, tokens = small_spec(model_id="async"), tokens_of(40, 12)
    kv = random_cache(spec, 40)
    async with await connect_async(sidecar.address) as client:
        receipt = await client.store(spec, tokens, kv)
        assert await client.wait(receipt) is Durability.MEMORY
        assert (await client.lookup(spec, tokens)).chunks[0].state is ChunkState.HIT
        assert_same(await client.fetch(spec, tokens), kv, [0, 1], 40)
        assert [layer async for layer, _ in client.fetch_layers(spec, tokens)] == [0, 1]
        assert (await client.stats()).arena.chunk_count

        other = tokens_of(40, seed=901)
        writer = await client.start_store(spec, other)
        into = [tuple(np.zeros_like(bits(each)) for each in pair) for pair in kv]
        transfer = await client.start_fetch(writer.ticket, into=into)
        for layer, pair in enumerate(kv):
            await client.call(writer.put_layer, layer, pair)
        await client.wait(writer.commit())
        await client.call(transfer.wait_layer, 0, 10.0)
        await client.call(transfer.wait, 10.0)
        assert_same(into, kv, [0, 1], 40)
        match = await client.lookup(spec, other, hold=True)
        await client.release_ticket(match.ticket)


def test_a_client_needs_no_torch(sidecar: Sidecar) -> None:
    import subprocess
    import sys

    code = f"""
import sys, numpy as np
from kvstore_client import connect
from tests.specs import small_spec, tokens_of, random_cache, bits
client = connect({sidecar.address!r})
spec, tokens = small_spec(model_id="bare"), tokens_of(40)
kv = random_cache(spec, 40)
client.store(spec, tokens, kv).wait()
fetched = client.fetch(spec, tokens)
assert fetched.token_count == 40 and (fetched[1][0] == kv[1][0]).all()
assert "torch" not in sys.modules and "kvstore.server" not in sys.modules
client.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
