"""What was fetched or merged as derived is not stored as exact by oversight, by whatever name it is given."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvstore_client import Client, Exactness, LayerStream, Paged, Transfer, connect, derived
from kvstore_client.recompute import GivenKV, MergedKV, Run, dense_planes
from kvstore_client.recompute.runs import check_runs
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from kvstore.spec import Durability
from tests.specs import bits, random_cache, small_spec, tokens_of

SPEC = small_spec()
COUNT, PAGE = 20, 10
TOKENS = tokens_of(COUNT, 1)
HIDDEN = {1: np.random.default_rng(2).integers(0, 65535, (COUNT, SPEC.hidden_size), np.uint16)}
DERIVED = Exactness.DERIVED
FORBIDDEN = "exactness=Exactness.DERIVED"
SLOTS = np.arange(COUNT)[::-1].copy()
RUNS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 64), st.integers(1, 9)).filter(lambda run: run[0] < run[1]), max_size=6
)
"""(start, stop, step) of some bytes."""


@pytest.fixture(scope="module")
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address) as connected:
        kv = random_cache(SPEC, COUNT, 1)
        for store in (connected.store, connected.store_segment):
            store(SPEC, TOKENS, kv, hidden=HIDDEN, exactness=DERIVED).wait(10)
        yield connected


def taken(found: Any) -> Any:
    """Every layer of it, in whatever way it comes."""
    assert found.exactness is DERIVED
    if isinstance(found, Transfer):
        found.wait(10)
        return [found.wait_layer(layer) for layer in range(2)]
    return [pair for _, pair in found] if isinstance(found, LayerStream) else found


def by_ticket(client: Client) -> Any:
    match = client.lookup(SPEC, TOKENS, hold=True, exactness=DERIVED)
    return client.start_fetch(match.ticket)


HANDED_OUT: dict[str, Callable[[Client], Any]] = {
    "fetch": lambda client: client.fetch(SPEC, TOKENS, exactness=DERIVED),
    "fetch_layers": lambda client: client.fetch_layers(SPEC, TOKENS, exactness=DERIVED),
    "fetch_segment": lambda client: client.fetch_segment(SPEC, TOKENS, exactness=DERIVED),
    "fetch_segment_layers": lambda client: client.fetch_segment_layers(SPEC, TOKENS, exactness=DERIVED),
    "start_fetch_prefix": lambda client: client.start_fetch_prefix(SPEC, TOKENS, exactness=DERIVED),
    "start_fetch_segment": lambda client: client.start_fetch_segment(SPEC, TOKENS, exactness=DERIVED),
    "start_fetch": by_ticket,
}
"""By method of the client."""
OTHERS = {"plan", "locate", "locate_each", "lookup", "peek", "store", "store_segment", "start_store", "join_store"}
"""Methods that say an exactness and hand out no tensors."""


def test_every_method_that_says_an_exactness_is_looked_at_here() -> None:
    found = {
        name
        for name, member in inspect.getmembers(Client, callable)
        if not name.startswith("_") and "exactness" in inspect.signature(member).parameters
    }
    assert found - OTHERS == set(HANDED_OUT) - {"start_fetch"}  # a ticket knows its own


def pages_of(kv: Any) -> list[Any]:
    """The same bits in fresh pages."""
    return [np.stack([bits(x).transpose(1, 0, 2).reshape(2, PAGE, 2, 8) for x in pair]) for pair in kv]


def put(client: Client, tokens: Any, kv: Any, **options: Any) -> Any:
    with client.start_store(SPEC, tokens, **options) as writer:
        for layer, pair in enumerate(kv):
            writer.put_layer(layer, pair)
        return writer.commit()


USES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda kv: kv,
    "a list": list,
    "a slice": lambda kv: kv[:],
    "two slices joined": lambda kv: kv[:1] + kv[1:],
    "layer by layer": lambda kv: [(kv[layer][0], kv[layer][1]) for layer in range(2)],
    "one layer of it": lambda kv: [kv[0], random_cache(SPEC, COUNT)[1]],
    "one plane of it": lambda kv: [(random_cache(SPEC, COUNT)[0][0], kv[0][1]), random_cache(SPEC, COUNT)[1]],
    "views": lambda kv: [tuple(x.view(x.dtype)[:, :].detach() for x in pair) for pair in kv],
    "numpy's view": lambda kv: [tuple(x.view(torch.int16).numpy().view(np.uint16) for x in pair) for pair in kv],
    "and back": lambda kv: [tuple(torch.from_numpy(x.view(torch.int16).numpy()).view(x.dtype) for x in pair)
                            for pair in kv],
    "backwards twice": lambda kv: [tuple(x.view(torch.int16).numpy().view(np.uint16)[::-1][::-1] for x in pair)
                                   for pair in kv],
}  # fmt: skip


@pytest.mark.parametrize("how", HANDED_OUT)
def test_what_is_fetched_as_derived_is_not_stored_as_exact(client: Client, how: str) -> None:
    kv = taken(HANDED_OUT[how](client))
    for number, (name, use) in enumerate(USES.items()):
        fresh = tokens_of(COUNT, 100 + number)
        for store in (client.store, client.store_segment):
            with pytest.raises(InvalidRequest, match=FORBIDDEN):
                store(SPEC, fresh, use(kv))
                pytest.fail(f"{name} was taken")
        with pytest.raises(InvalidRequest, match=FORBIDDEN):
            put(client, fresh, use(kv))
        assert client.lookup(SPEC, fresh).prefix_token_count == 0, name
    fresh = tokens_of(COUNT, 99)
    assert client.store(SPEC, fresh, kv, exactness=DERIVED).wait(10) is Durability.MEMORY
    assert client.lookup(SPEC, fresh).prefix_token_count == 0


def test_containers_know_it_however_they_are_copied(client: Client) -> None:
    kv = client.fetch(SPEC, TOKENS, exactness=DERIVED)
    exact = random_cache(SPEC, COUNT)
    joined = [kv + [], [] + kv, kv * 1, 1 * kv, kv.copy(), copy.copy(kv), copy.deepcopy(kv),  # noqa: RUF005
              kv[0:2], exact[:0] + kv]  # fmt: skip
    grown = derived.LayeredKV(exact)
    grown += kv
    longer = derived.LayeredKV(exact)
    longer[0:1] = kv[0:1]
    for each in [*joined, grown, longer]:
        assert each.exactness is DERIVED
    assert derived.LayeredKV(exact).copy().exactness is Exactness.EXACT
    for each in joined:
        with pytest.raises(InvalidRequest, match=FORBIDDEN):
            client.store(SPEC, tokens_of(COUNT, 98), each)


def test_hidden_states_are_known_too(client: Client) -> None:
    found = client.fetch(SPEC, TOKENS, hidden_layers=(1,), exactness=DERIVED)
    fresh, kv = tokens_of(COUNT, 97), random_cache(SPEC, COUNT)
    with pytest.raises(InvalidRequest, match=FORBIDDEN):
        client.store(SPEC, fresh, kv, hidden={1: found.hidden[1]})
    with client.start_store(SPEC, fresh, hidden_layers=(1,)) as writer:
        with pytest.raises(InvalidRequest, match=FORBIDDEN):
            writer.put_hidden(1, found.hidden[1][:5])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_callers_own_tensors_are_known_until_something_exact_is_there(client: Client, kind: str) -> None:
    planes = [tuple(np.zeros((2, COUNT + 4, 8), np.uint16) for _ in range(2)) for _ in range(2)]
    into: Any = planes
    if kind == "torch":
        into = [tuple(torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in pair) for pair in planes]
    client.fetch(SPEC, TOKENS, into=into, exactness=DERIVED)
    mine = [tuple(x[:, :COUNT] for x in pair) for pair in into]
    fresh = tokens_of(COUNT, 96 if kind == "numpy" else 95)
    with pytest.raises(InvalidRequest, match=FORBIDDEN):
        client.store(SPEC, fresh, mine)
    behind = [tuple(x[:, COUNT:] for x in pair) for pair in into]  # nothing was fetched there
    client.store(SPEC, fresh[:4], behind).wait(10)
    client.store(SPEC, fresh, mine, exactness=Exactness.EXACT).wait(10)  # who says so has computed it anew
    assert client.lookup(SPEC, fresh).prefix_token_count == COUNT
    part = client.fetch(SPEC, fresh[:10], into=into)
    assert part.token_count in (0, 4)
    with pytest.raises(InvalidRequest, match=FORBIDDEN):  # of which a part is exact now
        client.store(SPEC, tokens_of(COUNT, 94), mine)
    assert client.fetch(SPEC, fresh, into=into).exactness is Exactness.EXACT
    client.store(SPEC, tokens_of(COUNT, 93), mine).wait(10)


def test_a_tensor_is_known_when_the_view_of_numpy_that_was_filled_is_gone() -> None:
    tensor = torch.zeros(2, 2, COUNT, 8)
    for view in tensor.numpy():
        derived.mark_derived([view])
    del view
    assert derived.is_derived([tensor[1]])
    del tensor
    gc.collect()
    assert not derived.is_derived([torch.zeros(2, 2, COUNT, 8)])


def test_pages_are_known_by_their_slots(client: Client) -> None:
    pages = [np.zeros((2, 6, PAGE, 2, 8), np.uint16) for _ in range(2)]
    client.fetch(SPEC, TOKENS, into=Paged(pages, SLOTS), exactness=DERIVED)
    fresh = tokens_of(COUNT, 92)

    def layers(first: int) -> Any:
        return [Paged([each], np.arange(first, first + COUNT)) for each in pages]

    for kv in (layers(0), layers(COUNT - 1), [(x[0][:2].reshape(COUNT, 2, 8).transpose(1, 0, 2),) * 2 for x in pages]):
        with pytest.raises(InvalidRequest, match=FORBIDDEN):
            put(client, fresh, kv)
    put(client, fresh, layers(COUNT)).wait(10)  # other slots of the same pages
    assert client.lookup(SPEC, fresh).prefix_token_count == COUNT
    client.fetch(SPEC, fresh, into=Paged(pages, SLOTS))
    put(client, tokens_of(COUNT, 91), layers(0)).wait(10)


def test_other_shards_say_it_again(client: Client) -> None:
    kv = client.fetch(SPEC, TOKENS, exactness=DERIVED)
    half = [(k[:1], v[:1]) for k, v in kv]
    for exactness in (None, Exactness.EXACT):
        with client.start_store(SPEC, tokens_of(COUNT, 90), shards=2, exactness=exactness) as writer:
            other = client.join_store(writer.ticket, 1)
            with pytest.raises(InvalidRequest, match=FORBIDDEN):
                other.put_layer(0, half[0], heads=(0, 1))
            claiming = client.join_store(writer.ticket, 1, exactness=Exactness.EXACT)
            claiming.put_layer(0, half[0], heads=(0, 1))
            with pytest.raises(InvalidRequest, match="started as exact"):
                client.join_store(writer.ticket, 1, exactness=DERIVED)
            for each in (other, claiming):
                each.abort()


def test_memory_that_is_used_again_is_nobodys(client: Client) -> None:
    """The next cache in the same place is another's."""
    for number in range(5):
        kv = client.fetch(SPEC, TOKENS, exactness=DERIVED)
        merged = MergedKV(dense_planes(SPEC, COUNT), DERIVED)
        addresses = {int(x.data_ptr()) for pair in [*kv, *merged] for x in pair}
        del kv, merged
        gc.collect()
        made = [tuple(torch.zeros(2, COUNT, 8, dtype=torch.bfloat16) for _ in range(2)) for _ in range(40)]
        again = [pair for pair in made if {int(x.data_ptr()) for x in pair} & addresses] or made
        client.store(SPEC, tokens_of(COUNT, 300 + number), [again[0], again[-1]]).wait(10)
    assert not derived.is_derived(x for pair in made for x in pair)


def test_what_is_marked_while_something_exact_comes_stays_marked() -> None:
    """It was merged with what came, or over it."""
    plane = np.zeros((2, 4, 8), np.uint16)
    began = derived.now()
    derived.mark_derived([plane])
    derived.written_anew([plane], since=began)
    assert derived.is_derived([plane])
    derived.written_anew([plane], since=derived.now())
    assert not derived.is_derived([plane])


@pytest.mark.parametrize("slots", [None, np.arange(4)], ids=["whole", "pages"])
def test_marks_of_memory_that_is_filled_again_do_not_add_up(slots: Any) -> None:
    """A mark stays, too, while memory lives: the mark of a view ends with the view."""
    plane = torch.zeros((2, 4, 8), dtype=torch.int16)

    def count() -> int:
        return sum(mark.span.start == plane.data_ptr() for _, mark in derived._known())

    for _ in range(3):
        derived.mark_derived([plane], slots)
    assert count() == 1
    derived.mark_derived([plane.numpy()], slots)
    gc.collect()
    assert derived.is_derived([plane])
    array = np.zeros((2, 4, 8), np.int16)
    derived.mark_derived([array], slots)
    derived.mark_derived([torch.from_numpy(array)], slots)  # this view's owner is not known
    gc.collect()
    assert derived.is_derived([array])
    for stop in (2, 3, 2, 3):
        derived.mark_derived([plane[:, :stop]])
    assert count() == 2


def test_tensors_are_compared_with_the_marks_of_their_own_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds many derived caches stores others at once."""
    monkeypatch.setattr(derived, "_marks", {})
    kept, others = ([np.zeros((2, 4, 8), np.uint16) for _ in range(200)] for _ in range(2))
    derived.mark_derived(kept)
    compared: list[Any] = []
    meets = derived._Mark.meets

    def counted(*given: Any) -> bool:
        compared.append(given)
        return meets(*given)

    monkeypatch.setattr(derived._Mark, "meets", counted)
    assert not derived.is_derived(others)
    assert not compared
    assert derived.is_derived([*others, kept[7][1:]])
    assert len(compared) == 1


@given(marked=RUNS, asked=RUNS)
def test_whatever_lies_in_marked_memory_is_found(marked: list[Any], asked: list[Any]) -> None:
    memory = np.zeros(64, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derived, "_marks", {})
        derived.mark_derived([memory[start:stop:step] for start, stop, step in marked])
        touched = {byte for each in marked for byte in range(64)[slice(*each)]}
        expected = any(touched & set(range(64)[slice(*each)]) for each in asked)
        assert derived.is_derived([memory[start:stop:step] for start, stop, step in asked]) == expected


def test_garbage_that_is_collected_meanwhile_disturbs_nobody() -> None:
    """Caches that die in cycles, as those of errors do, take their marks away whenever something is allocated."""

    class Ring:
        def __init__(self) -> None:
            self.kv, self.me = np.zeros((2, 4, 8), np.uint16), self

    kept = [np.zeros((2, 4, 8), np.uint16) for _ in range(4000)]  # more than Python has pairs at hand for
    derived.mark_derived(kept)
    usual = gc.get_threshold()
    try:
        for use in (derived.written_anew, derived.mark_derived, derived.is_derived):
            gc.disable()
            derived.mark_derived([Ring().kv for _ in range(20)])
            gc.set_threshold(gc.get_count()[0] + 300)  # the rings die in the middle of what comes next
            gc.enable()
            use(kept[:1])
    finally:
        gc.set_threshold(*usual)
        gc.enable()
    assert derived.is_derived(kept[:1])


def test_merged_caches_and_what_is_made_of_them(client: Client) -> None:
    merged = MergedKV(dense_planes(SPEC, COUNT), DERIVED)
    exact = MergedKV(dense_planes(SPEC, COUNT), Exactness.EXACT)
    fresh = tokens_of(COUNT, 89)
    for kv in (
        merged,
        merged[:],
        merged[:1] + exact[1:],
        exact[:1] + merged[1:],
        list(merged),
        [*exact[:1], merged[1]],
    ):
        with pytest.raises(InvalidRequest, match=FORBIDDEN):
            client.store(SPEC, fresh, kv)
    with pytest.raises(InvalidRequest, match="was not exact"):  # it knows better than who says so
        client.store(SPEC, fresh, merged, exactness=Exactness.EXACT)
    client.store(SPEC, fresh, exact).wait(10)
    runs = [Run(0, COUNT, GivenKV(list(merged)), is_exact=True)]
    with pytest.raises(InvalidRequest, match=r"runs\[0\] is exact"):
        check_runs(runs, COUNT + 1, SPEC, 1)
    check_runs([Run(0, COUNT, GivenKV(list(merged)))], COUNT + 1, SPEC, 1)


def test_a_cache_that_goes_on_in_transformers_stays_derived(client: Client) -> None:
    from kvstore_client.engines.transformers import cache_of

    cache = cache_of(MergedKV(dense_planes(SPEC, COUNT - 1), DERIVED))
    assert cache.exactness is DERIVED
    for layer in range(2):
        cache.update(torch.ones(1, 2, 1, 8, dtype=torch.bfloat16), torch.ones(1, 2, 1, 8, dtype=torch.bfloat16), layer)
    grown = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    with pytest.raises(InvalidRequest, match=FORBIDDEN):
        client.store(SPEC, tokens_of(COUNT, 88), grown)
    assert cache_of(dense_planes(SPEC, COUNT)).exactness is Exactness.EXACT
