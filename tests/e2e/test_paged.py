"""Fetches into an engine's pages: any order of axes, any page size, scattered pages, heads and tokens left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Client, Paged, connect
from kvstore_client.planes.shared_memory.chunk import Chunk
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from kvstore.keys import Extra
from tests.specs import bits, odd_spec, random_cache, small_spec, tokens_of

SPEC = small_spec()
COUNT = 90
LAYOUTS = [
    "kv page slot head dim",
    "page kv head slot dim",
    "page head slot dim",
    "page slot head dim",
    "page head slot kv dim",
]


@pytest.fixture(scope="module")
def client(sidecar: Sidecar) -> Any:
    with connect(sidecar.address) as connected:
        connected.store(SPEC, tokens_of(COUNT), random_cache(SPEC, COUNT)).wait()
        yield connected


def engine_pages(layout: str, pages: int, size: int, heads: int, dim: int, *, pairs: bool, tensor: bool) -> list[Any]:
    """Poisoned pages of two layers."""
    names = layout.split()
    extent = {"kv": 2, "page": pages, "slot": size, "head": heads, "dim": dim if pairs or "kv" in names else 2 * dim}
    shape = [extent[name] for name in names]

    def poisoned() -> Any:
        array = np.full(shape, 0xDBDB, np.uint16)
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if tensor else array

    return [(poisoned(), poisoned()) if pairs else poisoned() for _ in range(2)]


def slots_in(count: int, pages: int, size: int, order: str = "scattered") -> Any:
    """Slots of a prompt whose pages lie anywhere, or one behind another from the first page on, or to it."""
    pages_of = {
        "scattered": np.random.default_rng(1).permutation(pages),
        "rising": np.arange(pages),
        "falling": np.arange(-(-count // size))[::-1],
    }[order]
    return np.array([pages_of[token // size] * size + token % size for token in range(count)])


@pytest.mark.parametrize("tensor", [True, False], ids=["torch", "numpy"])
@pytest.mark.parametrize("size", [1, 16, 24])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_lands_in_its_slot_and_nothing_else(client: Client, layout: str, size: int, tensor: bool) -> None:
    pages = -(-COUNT // size) + 3
    pairs = layout == "page slot head dim"
    layers = engine_pages(layout, pages, size, 2, 8, pairs=pairs, tensor=tensor)
    slots = slots_in(COUNT, pages, size)
    slots[5:9] = -1
    fetched = client.fetch(SPEC, tokens_of(COUNT), into=Paged(layers, slots, layout), verify=True)
    assert fetched.token_count == COUNT
    here = slots >= 0
    cache = random_cache(SPEC, COUNT)
    for (k, v), (ck, cv) in zip(fetched, cache, strict=True):
        for view, plane in ((k, ck), (v, cv)):
            flat = np.ascontiguousarray(bits(view) if tensor else view).reshape(pages * size, 2, 8)
            assert (flat[slots[here]] == plane.transpose(1, 0, 2)[here]).all()
            others = np.setdiff1d(np.arange(pages * size), slots[here])
            assert (flat[others] == 0xDBDB).all()


@pytest.mark.parametrize("heads", [None, (1, 2)])
@pytest.mark.parametrize("size", [8, 16])
def test_chunks_of_whole_pages_are_written_together(client: Client, size: int, heads: Any) -> None:
    count = 80
    layers = engine_pages(LAYOUTS[1], count // size, size, 1 if heads else 2, 8, pairs=False, tensor=True)
    into = Paged(layers, slots := slots_in(count, count // size, size), LAYOUTS[1])
    fetched = client.fetch(SPEC, tokens_of(COUNT)[:count], into=into, heads=heads)
    assert fetched.token_count == count
    for layer, (ck, cv) in zip(layers, random_cache(SPEC, COUNT), strict=True):
        for view, plane in zip(np.moveaxis(bits(layer), 1, 0), (ck, cv), strict=True):
            flat = view.swapaxes(1, 2).reshape(count, -1, 8)
            assert (flat[slots] == plane[slice(*(heads or (0, 2))), :count].swapaxes(0, 1)).all()


@pytest.mark.parametrize("count", [COUNT, 80])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("layers", [None, [1]])
def test_a_graph_that_needs_pages_learns_of_a_fetch_into_them(
    client: Client, count: int, verify: bool, layers: list[int] | None
) -> None:
    pages = engine_pages(LAYOUTS[0], 6, 16, 2, 8, pairs=False, tensor=True)[: len(layers or "KV")]
    x = torch.ones(pages[0].shape, dtype=torch.bfloat16, requires_grad=True)
    graph = (x * pages[-1]).sum()
    into = Paged(pages, np.arange(count), LAYOUTS[0])
    assert client.fetch(SPEC, tokens_of(5, 99), into=into, layers=layers).token_count == 0
    graph.backward(retain_graph=True)  # a miss wrote nothing
    assert client.fetch(SPEC, tokens_of(COUNT)[:count], into=into, layers=layers, verify=verify).token_count == count
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


def test_the_values_of_an_engines_dict_are_fetched_into(client: Client) -> None:
    pages: Any = dict(enumerate(engine_pages(LAYOUTS[0], 6, 16, 2, 8, pairs=False, tensor=True))).values()
    assert client.fetch(SPEC, tokens_of(COUNT), into=Paged(pages, np.arange(COUNT), LAYOUTS[0])).token_count == COUNT


def test_pages_made_in_inference_mode_are_fetched_into(client: Client) -> None:
    """They have no graph that could be told."""
    with torch.inference_mode():
        pages = engine_pages(LAYOUTS[0], 6, 16, 2, 8, pairs=False, tensor=True)
    assert client.fetch(SPEC, tokens_of(COUNT), into=Paged(pages, np.arange(COUNT), LAYOUTS[0])).token_count == COUNT


def test_a_chunk_that_fails_its_checksums_is_not_written(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the pages hold is the engine's, and the chunk is a miss."""
    monkeypatch.setattr(Chunk, "is_intact", lambda self, *_: self.token_start != 32)
    layers = engine_pages(LAYOUTS[0], 6, 16, 2, 8, pairs=False, tensor=True)
    with connect(local_sidecar.address) as client:
        client.store(SPEC, tokens_of(COUNT), random_cache(SPEC, COUNT)).wait()
        found = client.fetch(SPEC, tokens_of(COUNT), into=Paged(layers, np.arange(COUNT), LAYOUTS[0]), verify=True)
    assert found.token_count == 32
    assert all((bits(layer)[:, 2] == 0xDBDB).all() for layer in layers)


def test_heads_layers_and_streams(client: Client) -> None:
    layers = engine_pages("page kv head slot dim", 9, 16, 1, 8, pairs=False, tensor=True)[:1]
    into = Paged(layers, slots_in(COUNT, 9, 16), "page kv head slot dim")
    stream = client.fetch_layers(SPEC, tokens_of(COUNT), layers=[1], heads=(1, 2), into=into)
    [(layer, (k, _))] = list(stream)
    assert layer == 1
    flat = np.ascontiguousarray(bits(k)).reshape(144, 1, 8)
    assert (flat[into.slots, 0] == random_cache(SPEC, COUNT)[1][0][1]).all()


def test_mla_pages(sidecar: Sidecar) -> None:
    spec = odd_spec("bfloat16", 1, 24, 8, 128, mla=True)
    tokens, cache = tokens_of(300), random_cache(spec, 300)
    with connect(sidecar.address) as client:
        client.store(spec, tokens, cache).wait()
        layers = [np.zeros((24, 16, 32), np.uint16) for _ in range(2)]
        slots = slots_in(300, 24, 16)
        assert client.fetch(spec, tokens, into=Paged(layers, slots, "page slot dim")).token_count == 300
    for page, (latent, rope) in zip(layers, [each for each in cache if each], strict=True):
        flat = page.reshape(384, 32)[slots]
        assert (flat == np.concatenate([latent[0], rope[0]], axis=-1)).all()


@pytest.mark.parametrize("order", ["scattered", "rising", "falling"])
@pytest.mark.parametrize("tensor", [True, False], ids=["torch", "numpy"])
@pytest.mark.parametrize("size", [1, 8, 24])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_store_takes_every_token_from_its_slot(
    client: Client, layout: str, size: int, tensor: bool, order: str
) -> None:
    pages, pairs = -(-COUNT // size) + 3, layout == "page slot head dim"
    layers = engine_pages(layout, pages, size, 2, 8, pairs=pairs, tensor=tensor)
    kept = Paged(layers, slots_in(COUNT, pages, size, order), layout)
    assert client.fetch(SPEC, tokens_of(COUNT), into=kept).token_count == COUNT
    salt = [Extra(0, f"{layout}/{size}/{tensor}/{order}".encode())]
    receipt = client.store(SPEC, tokens_of(COUNT), kept, extras=salt)
    for layer in layers:
        for plane in layer if pairs else [layer]:
            plane[...] = 0  # they may be reused
    receipt.wait()
    assert receipt.stored_token_count == COUNT, receipt.reason
    fetched = client.fetch(SPEC, tokens_of(COUNT), extras=salt, verify=True)
    assert fetched.token_count == COUNT
    for pair, expected in zip(fetched, random_cache(SPEC, COUNT), strict=True):
        for plane, right in zip(pair, expected, strict=True):
            assert (bits(plane) == right).all()


def test_a_store_from_pages_of_a_latent_cache(sidecar: Sidecar) -> None:
    spec = odd_spec("bfloat16", 1, 24, 8, 128, mla=True)
    tokens, cache = tokens_of(300), random_cache(spec, 300)
    slots = slots_in(300, 24, 16)
    layers = [np.zeros((384, 32), np.uint16) for _ in range(2)]
    for page, (latent, rope) in zip(layers, [each for each in cache if each], strict=True):
        page[slots] = np.concatenate([latent[0], rope[0]], axis=-1)
    salt = [Extra(0, b"from pages")]
    with connect(sidecar.address) as client:
        paged = Paged([page.reshape(24, 16, 32) for page in layers], slots, "page slot dim")
        assert client.store(spec, tokens, paged, extras=salt).wait()
        fetched = client.fetch(spec, tokens, extras=salt, verify=True)
    assert fetched.token_count == 300
    for pair, expected in zip(fetched, [each for each in cache if each], strict=True):
        for plane, right in zip(pair, expected, strict=True):
            assert (bits(plane) == right).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": np.arange(COUNT - 1)}, "names 89 tokens, the prompt has 90"),
        ({"slots": np.append(np.arange(COUNT - 1), -1)}, "a token without a place"),
        ({"slots": np.arange(COUNT) + 9 * 16}, "outside"),
        ({"layers": []}, "0 entries"),
        ({"hidden": {0: np.zeros((COUNT, 32), np.uint16)}}, "pages hold K and V"),
    ],
)
def test_a_store_from_pages_that_do_not_fit_is_refused(client: Client, change: dict[str, Any], words: str) -> None:
    hidden = change.get("hidden")
    layers = engine_pages("kv page slot head dim", 9, 16, 2, 8, pairs=False, tensor=False)
    given = {"layers": layers, "slots": np.arange(COUNT), **{key: change[key] for key in change if key != "hidden"}}
    with pytest.raises(InvalidRequest, match=words):
        client.store(SPEC, tokens_of(COUNT, 3), Paged(**given), hidden=hidden)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "page slot head"}, "dim must be there"),
        ({"layout": "page page slot head dim"}, "each axis once"),
        ({"layout": "page slot head dim"}, "axes"),
        ({"slots": np.arange(COUNT) + 9 * 16}, "outside"),
        ({"slots": np.arange(10)}, "names 10 tokens"),
        ({"slots": np.append(np.arange(COUNT - 1), 17)}, "slot 17 for two tokens"),
        ({"slots": np.append(np.arange(4, COUNT), [-1, -1, 4, 3])}, "slot 4 for two tokens"),
        ({"slots": np.ones(COUNT)}, "whole numbers"),
        ({"layers": []}, "0 entries"),
        ({"heads": 3}, "heads"),
        ({"dtype": np.float32}, "float32"),
    ],
)
def test_pages_that_do_not_fit_are_named(client: Client, change: dict[str, Any], words: str) -> None:
    change = dict(change)  # each plane has its own
    layers = engine_pages("kv page slot head dim", 9, 16, change.pop("heads", 2), 8, pairs=False, tensor=False)
    if "dtype" in change:
        layers = [each.astype(change["dtype"]) for each in layers]
        change = {}
    given = {"layers": layers, "slots": np.arange(COUNT), "layout": "kv page slot head dim", **change}
    with pytest.raises(InvalidRequest, match=words):
        client.fetch(SPEC, tokens_of(COUNT), into=Paged(**given))


def test_tokens_that_are_not_wanted_before_the_first_slot(client: Client) -> None:
    """-1 and then slot 0 look like neighbours."""
    skipped = 16
    slots = np.concatenate([np.full(skipped, -1), np.arange(COUNT - skipped)])
    pages = [np.full((2, 20, 4, 2, 8), 0xDBDB, np.uint16) for _ in range(2)]
    cache = random_cache(SPEC, COUNT)
    assert client.fetch(SPEC, tokens_of(COUNT), into=Paged(pages, slots)).token_count == COUNT
    for layer in range(2):
        for which in range(2):
            got = pages[layer][which].reshape(80, 2, 8)[: COUNT - skipped]
            assert (got == bits(cache[layer][which]).transpose(1, 0, 2)[skipped:]).all()


@pytest.mark.parametrize("spoil", ["read-only", "backwards", "shared", "shared tensor", "between items"])
def test_pages_that_cannot_be_written_are_refused(client: Client, spoil: str) -> None:
    pages = [np.zeros((2, 6, 16, 2, 8), np.uint16) for _ in range(2)]
    if spoil == "read-only":
        pages[1].flags.writeable = False
    elif spoil == "backwards":
        pages[1] = pages[1][:, ::-1]
    elif spoil == "shared":
        pages[1] = np.lib.stride_tricks.as_strided(
            pages[1], pages[1].shape, (pages[1].strides[0], 0, *pages[1].strides[2:])
        )
    elif spoil == "shared tensor":
        pages[1] = torch.zeros((2, 1, 16, 2, 8), dtype=torch.bfloat16).expand(-1, 6, -1, -1, -1)
    else:
        pages[1] = np.zeros(pages[1].shape, [("kept", np.uint16), ("other", np.uint8)])["kept"]
    with pytest.raises(InvalidRequest, match=r"layers\[1\] is read-only"):
        client.fetch(SPEC, tokens_of(COUNT), into=Paged(pages, np.arange(COUNT)))


@pytest.mark.parametrize("tensor", [True, False], ids=["torch", "numpy"])
def test_layers_of_one_pool_that_share_memory_are_refused_and_interleaved_ones_are_not(
    client: Client, tensor: bool
) -> None:
    """Layers that look the same are told from each other by where they lie."""
    pool: Any = np.zeros((2, 6, 2, 16, 2, 8), np.uint16)
    if tensor:
        pool = torch.from_numpy(pool.view(np.int16)).view(torch.bfloat16)
    interleaved = [pool[:, :, layer] for layer in range(2)]
    found = client.fetch(SPEC, tokens_of(COUNT), into=Paged(interleaved, np.arange(COUNT)))
    assert found.token_count == COUNT
    for layer, (k, _) in enumerate(random_cache(SPEC, COUNT)):
        flat = np.ascontiguousarray(bits(interleaved[layer][0])).reshape(96, 2, 8)
        assert (flat[:COUNT] == k.transpose(1, 0, 2)).all()
    with pytest.raises(InvalidRequest, match=r"layers\[0\] and layers\[1\] share memory"):
        client.fetch(SPEC, tokens_of(COUNT), into=Paged([interleaved[0]] * 2, np.arange(COUNT)))


@pytest.mark.parametrize("tensor", [True, False], ids=["torch", "numpy"])
def test_a_last_layer_of_another_dtype_is_found(client: Client, tensor: bool) -> None:
    layers = engine_pages(LAYOUTS[0], 6, 16, 2, 8, pairs=False, tensor=tensor)
    layers[1] = layers[1].view(torch.float16) if tensor else layers[1].view(np.float16)
    with pytest.raises(InvalidRequest, match="layers of layer 1 is float16"):
        client.fetch(SPEC, tokens_of(COUNT), into=Paged(layers, np.arange(COUNT), LAYOUTS[0]))
