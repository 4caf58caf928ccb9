"""Copies by compiled code, and those by torch and numpy where there is none: what one stores the other fetches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Client, Paged, connect
from kvstore_client.fetch import calls as calls_of_fetches
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.shared_memory.chunk import runs_of
from kvstore_copies import Batch, is_compiled
from kvstore_ops.bench.paged import ask
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Internal, InvalidRequest
from kvstore.spec import LayerSpec
from tests.specs import bits, random_cache, same, small_spec, tokens_of

COUNT = 75
"""Four whole chunks, and a part of a fifth one."""
SHAPES = {
    "alike": (LayerSpec(kv_heads=2, k_dim=64, v_dim=64),) * 3,
    "k and v unlike": (LayerSpec(kv_heads=2, k_dim=24, v_dim=8),) * 3,
    "layers unlike": (LayerSpec(kv_heads=2, k_dim=8, v_dim=8), LayerSpec(kv_heads=4, k_dim=8, v_dim=8)) * 2,
}
SPECS = {name: small_spec(layers=layers, model_id=f"copies-{name}") for name, layers in SHAPES.items()}
LAYOUTS = ("kv page slot head dim", "page kv head slot dim")
Copies = Callable[[bool], None]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Sidecar("--capacity", "32 MiB") as running, connect(running.address, timeout_s=10.0) as connected:
        yield connected


@pytest.fixture
def compiled() -> Iterator[Copies]:
    """Chooses the copies of what follows."""
    if not is_compiled():
        pytest.skip("kvstore was installed without a C compiler")

    def choose(value: bool) -> None:
        if value:
            plain.undo()
        else:
            plain.setattr("kvstore_copies.batch._copy", lambda: None)

    with pytest.MonkeyPatch.context() as plain:
        yield choose


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The calls of compiled code so far."""
    made: list[Batch] = []
    run = Batch._run

    def counted(batch: Batch, slice_count: int) -> None:
        made.append(batch)
        run(batch, slice_count)

    monkeypatch.setattr(Batch, "_run", counted)
    return made


def engines_planes(cache: list[Any], count: int = COUNT) -> list[Any]:
    """Return a cache in tensors as engines have them: tokens before heads, from the middle of more of them."""
    planes = []
    for layer in cache:
        room = [torch.zeros(count + 9, plane.shape[0], plane.shape[2], dtype=torch.bfloat16) for plane in layer]
        for each, plane in zip(room, layer, strict=True):
            each[3 : 3 + count] = torch.from_numpy(bits(plane).view(np.int16)).view(torch.bfloat16).transpose(0, 1)
        planes.append(tuple(each.transpose(0, 1)[:, 3 : 3 + count] for each in room))
    return planes


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("stores", "fetches"), [(True, True), (True, False), (False, True)])
def test_dense_planes(
    client: Client, compiled: Copies, calls: list[Batch], name: str, stores: bool, fetches: bool
) -> None:  # fmt: skip
    spec, seed = SPECS[name], 10 + stores + 2 * fetches
    tokens, cache = tokens_of(COUNT, seed), random_cache(spec, COUNT, seed)
    compiled(stores)
    client.store(spec, tokens, engines_planes(cache)).wait(10)
    assert bool(calls) is (stores and name != "layers unlike")
    calls.clear()
    compiled(fetches)
    for _ in range(2):  # by a call; and without one
        found = client.fetch(spec, tokens)
        assert found.token_count == COUNT
        assert same(found, cache)
        into = engines_planes([tuple(np.zeros_like(plane) for plane in layer) for layer in cache])
        assert client.fetch(spec, tokens, into=into).token_count == COUNT
        assert same(into, cache)
    assert bool(calls) is (fetches and name != "layers unlike")
    for layer, (k, v) in client.fetch_layers(spec, tokens):
        assert same([(k, v)], [cache[layer]])
    head = client.fetch(spec, tokens, heads=(1, 2), layers=[0, 2])
    assert same(head, [tuple(plane[1:2] for plane in cache[layer]) for layer in (0, 2)])


@pytest.mark.parametrize("count", [72, COUNT])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [8, 64])
@pytest.mark.parametrize(("stores", "fetches"), [(True, True), (True, False), (False, True)])
def test_pages(
    client: Client, compiled: Copies, calls: list[Batch], layout: str, dim: int, stores: bool, fetches: bool,
    count: int,
) -> None:  # fmt: skip
    """Pages of 8, in random order, with some that belong to others; the last one may be filled in part."""
    spec = small_spec(layers=(LayerSpec(kv_heads=2, k_dim=dim, v_dim=dim),) * 3, model_id=f"pages-{dim}-{layout}")
    seed, page_count = 40 + stores + 2 * fetches + 4 * count, 24
    tokens, rng = tokens_of(count, seed), np.random.default_rng(seed)
    sizes = {"kv": 2, "page": page_count, "slot": 8, "head": 2, "dim": dim}
    shape = [sizes[axis] for axis in layout.split()]

    def pages(fill: Callable[[], np.ndarray]) -> Paged:
        order = rng.permutation(page_count)[: -(-count // 8)]
        slots = (order[:, None] * 8 + np.arange(8)).reshape(-1)[:count]
        return Paged([torch.from_numpy(fill()).view(torch.bfloat16) for _ in range(3)], slots, layout)

    def of(paged: Paged, layer: int, which: int) -> np.ndarray:
        names = layout.split()
        view = paged.layers[layer].permute([names.index(axis) for axis in sizes])[which]
        return bits(view.reshape(page_count * 8, 2, dim)[paged.slots])

    source = pages(lambda: rng.integers(0, 1 << 15, shape, np.int16))
    compiled(stores)
    client.store(spec, tokens, source).wait(10)
    assert bool(calls) is stores, "of the whole chunks, at least"
    calls.clear()
    compiled(fetches)
    into = pages(lambda: np.full(shape, 0x5A5A, np.int16))
    assert client.fetch(spec, tokens, into=into).token_count == count
    assert bool(calls) is (fetches and count % 8 == 0)
    for layer in range(3):
        for which in range(2):
            assert np.array_equal(of(into, layer, which), of(source, layer, which))
        flat = into.layers[layer].permute([layout.split().index(axis) for axis in sizes]).reshape(2, page_count * 8, -1)
        others = np.setdiff1d(np.arange(page_count * 8), into.slots)
        assert (bits(flat[:, others]) == 0x5A5A).all(), "a page of somebody else's was written"


def test_planes_of_several_strides(client: Client, compiled: Copies) -> None:
    """Tensors that have room for other numbers of tokens, and heads in another order of axes."""
    compiled(True)
    spec = SPECS["alike"]
    tokens, cache = tokens_of(COUNT, 70), random_cache(spec, COUNT, 70)
    client.store(spec, tokens, cache).wait(10)
    rooms = [torch.full((2, COUNT + 7 * number, 64), 7, dtype=torch.bfloat16) for number in (0, 0, 1, 1, 0)]
    turned = [torch.full((COUNT, 2, 64), 7, dtype=torch.bfloat16).transpose(0, 1)]
    into = [(rooms[0], rooms[1]), (rooms[2], rooms[3]), (turned[0], rooms[4])]
    for _ in range(2):
        assert client.fetch(spec, tokens, into=into).token_count == COUNT
        assert same([tuple(plane[:, :COUNT] for plane in layer) for layer in into], cache)
        assert all((plane[:, COUNT:] == 7).all() for plane in rooms), "bytes behind the tokens were written"
        for plane in (*rooms, *turned):
            plane.fill_(7)


def test_runs_of_chunks_that_lie_apart(client: Client, compiled: Copies) -> None:
    """Another prompt's chunks lie between those of this one."""
    compiled(True)
    spec = SPECS["alike"]
    tokens, cache = tokens_of(64, 80), random_cache(spec, 64, 80)
    for stop in (16, 48, 64):
        client.store(spec, tokens[:stop], [tuple(plane[:, :stop] for plane in layer) for layer in cache]).wait(10)
        client.store(spec, tokens_of(32, 81 + stop), random_cache(spec, 32, 81 + stop)).wait(10)
    runs = runs_of(ask(client, spec, tokens).chunks)
    assert len(runs) > 1 or runs[0].stride > runs[0].chunks[0].layout.total_bytes, "they lie apart"
    for _ in range(2):
        assert same(client.fetch(spec, tokens), cache)
        into = engines_planes([tuple(np.zeros_like(plane) for plane in layer) for layer in cache], 64)
        assert client.fetch(spec, tokens, into=into).token_count == 64
        assert same(into, cache)


NO_MEMORY = "setStorage|out of bounds|share memory"
"""The last where what a tensor says it has reaches over another one."""
REFUSED = (RuntimeError, Internal, InvalidRequest)


def shrunk(plane: torch.Tensor) -> None:
    plane.untyped_storage().resize_(100)


def freed(plane: torch.Tensor) -> None:
    plane.untyped_storage().resize_(0)


def halved(plane: torch.Tensor) -> None:
    plane.untyped_storage().resize_(plane.untyped_storage().nbytes() // 2)


@pytest.mark.parametrize("spoil", [shrunk, freed, halved])
@pytest.mark.parametrize("compiles", [True, False])
def test_tensors_that_lost_their_memory_are_neither_read_nor_written(
    client: Client, compiled: Copies, spoil: Callable[[torch.Tensor], None], compiles: bool
) -> None:  # fmt: skip
    """torch notices where it makes a view; addresses alone say nothing of what lies there."""
    compiled(compiles)
    spec = SPECS["alike"]
    tokens, cache = tokens_of(COUNT, 90), random_cache(spec, COUNT, 90)
    client.store(spec, tokens, cache).wait(10)
    for layer in (0, 2):
        planes = engines_planes(cache)
        spoil(planes[layer][1])
        with pytest.raises(REFUSED, match=NO_MEMORY):
            client.store(spec, tokens_of(COUNT, 91), planes)
        for verify in (False, False, True):
            with pytest.raises(REFUSED, match=NO_MEMORY):
                client.fetch(spec, tokens, into=planes, verify=verify)
        with pytest.raises(REFUSED, match=NO_MEMORY):
            client.start_fetch_prefix(spec, tokens, into=planes).wait(10)
    assert same(client.fetch(spec, tokens), cache)


def test_memory_that_tensors_get_while_a_ticket_is_redeemed_is_written(
    client: Client, compiled: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The destination is looked at when bytes are copied, not only when the fetch is asked for."""
    compiled(True)
    spec = SPECS["alike"]
    tokens, cache = tokens_of(COUNT, 92), random_cache(spec, COUNT, 92)
    client.store(spec, tokens, cache).wait(10)
    ticket = client.lookup(spec, tokens, hold=True).ticket
    planes = [tuple(torch.zeros(plane.shape, dtype=torch.bfloat16) for plane in layer) for layer in cache]
    moved, open_held = torch.full_like(planes[1][0], 7), calls_of_fetches.open_held

    def late(*arguments: Any) -> Any:
        planes[1][0].data = moved
        return open_held(*arguments)

    monkeypatch.setattr(calls_of_fetches, "open_held", late)
    client.start_fetch(ticket, into=planes).wait(10)
    assert same(planes, cache)
    assert same([(moved,)], [(cache[1][0],)])


@pytest.mark.parametrize("verify", [False, True])
def test_a_graph_that_needs_a_tensor_learns_of_a_fetch_into_it(
    client: Client, compiled: Copies, calls: list[Batch], verify: bool
) -> None:  # fmt: skip
    spec = SPECS["alike"]
    tokens, cache = tokens_of(COUNT, 93), random_cache(spec, COUNT, 93)
    client.store(spec, tokens, cache).wait(10)
    for compiles in (True, False):
        compiled(compiles)
        calls.clear()
        into = engines_planes(cache)
        x = torch.ones(into[0][0].shape, dtype=torch.bfloat16, requires_grad=True)
        graph = (x * into[0][0]).sum()
        client.fetch(spec, tokens, into=into, verify=verify)
        assert bool(calls) is (compiles and not verify)
        calls.clear()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()


@pytest.mark.parametrize("hidden", [np.array([1]), torch.tensor([1]), np.array([], int), [1], ()])
def test_what_names_hidden_layers_is_taken_in_any_form(hidden: Any) -> None:
    assert Wanted.of(SPECS["alike"], None, None, hidden, False).hidden_layers == tuple(map(int, hidden))
