"""What a cache may be fetched into: all its layers are looked at, also where they seem alike. Needs no server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvstore_client.fetch import fused, in_memory
from kvstore_client.fetch.fused import Planes, copies_of
from kvstore_client.fetch.given import given_planes
from kvstore_client.fetch.in_memory import placed_planes
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.overlap import Span, overlapping
from kvstore_client.planes.shared_memory.chunk import MappedRun
from kvstore_client.prompt import Prompt
from kvstore_client.store.tensors import Tensors
from kvstore_copies import Questions, address_of, is_compiled

from kvstore.chunk import layout_of
from kvstore.errors import InvalidRequest
from kvstore.spec import CacheKind
from tests.e2e.odd_arrays import Odd, odd_arrays, tensor
from tests.specs import small_spec

SPEC = small_spec()
LAYERS = SPEC.layer_count
SHAPE = (SPEC.layers[0].kv_heads, 20, SPEC.layers[0].k_dim)
WANTED = Wanted.of(SPEC, None, None, (), False)
ODD = list(odd_arrays(SPEC.cache_dtype))


@pytest.fixture(autouse=True, params=[False, True], ids=["told by compiled code", "told by torch"])
def _told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(in_memory, "alike_columns", lambda *_: None)


@pytest.mark.parametrize("odd", ODD, ids=[odd.name for odd in ODD])
def test_one_odd_plane_among_planes_that_are_right_is_found(odd: Odd) -> None:
    into: list[tuple[Any, Any]] = [
        (tensor(SHAPE, SPEC.cache_dtype), tensor(SHAPE, SPEC.cache_dtype)) for _ in range(LAYERS)
    ]
    into[-1] = (into[-1][0], odd.make(SHAPE, SPEC.cache_dtype))
    if odd.as_target:
        found = given_planes(WANTED, into)
        assert found is not None
        assert len(found.layers) == LAYERS
        return
    with pytest.raises(InvalidRequest, match=rf"into\[{LAYERS - 1}\]"):
        given_planes(WANTED, into)


def test_all_v_of_another_dtype_are_found() -> None:
    into = [(tensor(SHAPE, SPEC.cache_dtype), tensor(SHAPE, "float16")) for _ in range(LAYERS)]
    with pytest.raises(InvalidRequest, match=r"into\[0\].*float16"):
        given_planes(WANTED, into)


def test_a_layer_of_other_heads_is_looked_at() -> None:
    """Two layers of one shape, of which the model keeps one only."""
    into = [(tensor(SHAPE, SPEC.cache_dtype), tensor(SHAPE, SPEC.cache_dtype)) for _ in range(LAYERS)]
    part = Wanted.of(SPEC, None, range(1), (), False)
    with pytest.raises(InvalidRequest, match=r"into\[0\]"):
        given_planes(part, into)


@pytest.mark.parametrize("odd", ODD, ids=[odd.name for odd in ODD])
def test_one_odd_plane_of_a_store_is_found(odd: Odd) -> None:
    kv: list[tuple[Any, Any]] = [
        (tensor(SHAPE, SPEC.cache_dtype), tensor(SHAPE, SPEC.cache_dtype)) for _ in range(LAYERS)
    ]
    kv[-1] = (kv[-1][0], odd.make(SHAPE, SPEC.cache_dtype))
    prompt = Prompt.of(SPEC, np.arange(SHAPE[1]), (), None)
    if odd.as_source:
        assert len(Tensors.of(prompt, kv, None).planes[0]) == LAYERS
        return
    with pytest.raises(InvalidRequest, match=rf"kv\[{LAYERS - 1}\]"):
        Tensors.of(prompt, kv, None)


def test_layers_of_one_stride_have_room_of_their_own() -> None:
    heads, tokens, dim = SHAPE
    into = [
        tuple(tensor((heads, 32, dim), SPEC.cache_dtype)[:, : tokens - number] for _ in "KV")
        for number in range(LAYERS)
    ]
    found = given_planes(WANTED, into)
    assert found is not None
    assert list(found.rooms) == [tokens - number for number in range(LAYERS)]


def test_a_plane_that_reaches_over_another_one_is_found() -> None:
    """The last plane's heads lie further apart than those of the others, and one of them over another plane."""
    heads, tokens, dim = SHAPE
    size = heads * tokens * dim
    memory = tensor((4 * size,), SPEC.cache_dtype)
    wide = memory.as_strided(SHAPE, (size, dim, 1))
    into = [(tensor(SHAPE, SPEC.cache_dtype), tensor(SHAPE, SPEC.cache_dtype)) for _ in range(LAYERS)]
    into[-1] = (memory[size : 2 * size].view(SHAPE), wide)
    with pytest.raises(InvalidRequest, match="share"):
        given_planes(WANTED, into)


@pytest.mark.parametrize("axis", [0, 1])
def test_planes_that_all_have_items_in_one_place_are_refused(axis: int) -> None:
    """Each has one head, or one token, that stands for all."""
    shape = list(SHAPE)
    shape[axis] = 1
    into = [tuple(tensor((*shape,), SPEC.cache_dtype).expand(SHAPE) for _ in "KV") for _ in range(LAYERS)]
    with pytest.raises(InvalidRequest, match="share memory"):
        given_planes(WANTED, into)


@pytest.mark.parametrize("axis", [0, 2])
def test_planes_of_another_model_that_are_all_alike_are_refused(axis: int) -> None:
    shape = list(SHAPE)
    shape[axis] += 1
    into = [tuple(tensor((*shape,), SPEC.cache_dtype) for _ in "KV") for _ in range(LAYERS)]
    with pytest.raises(InvalidRequest, match="shape"):
        given_planes(WANTED, into)


def test_views_do_not_reach_beyond_their_plane() -> None:
    """A chunk that lay behind the tokens that were asked for would be written over the next plane of its storage."""
    layout = layout_of(SPEC, CacheKind.KV, SPEC.chunk_tokens, None)
    home = (np.zeros(layout.total_bytes, np.uint8), 0, 0)
    chunk: Any = SimpleNamespace(token_start=16, layout=layout, home=home, address=address_of(home[0]))
    run = MappedRun([chunk], 0)
    sides = [[tensor((SHAPE[0], 32, SHAPE[2]), SPEC.cache_dtype) for _ in range(LAYERS)] for _ in "KV"]
    heads = range(SHAPE[0])
    assert copies_of(Planes(sides), 16 + SPEC.chunk_tokens, [run], SPEC.slab_layers, heads) is not None
    assert copies_of(Planes(sides), 15 + SPEC.chunk_tokens, [run], SPEC.slab_layers, heads) is None


@pytest.mark.skipif(not is_compiled(), reason="kvstore was installed without a C compiler: views check their bounds")
def test_a_chunk_that_its_region_does_not_hold_is_not_read() -> None:
    """Two chunks, of which the region has one and all but a byte of the other."""
    layout = layout_of(SPEC, CacheKind.KV, SPEC.chunk_tokens, None)
    sides = [[tensor((SHAPE[0], 32, SHAPE[2]), SPEC.cache_dtype) for _ in range(LAYERS)] for _ in "KV"]
    for size, is_there in ((2 * layout.total_bytes, True), (2 * layout.total_bytes - 1, False)):
        home = (np.zeros(size, np.uint8), 0, 0)
        chunks: list[Any] = [
            SimpleNamespace(token_start=start, layout=layout, home=home, address=address_of(home[0]) + place)
            for start, place in ((0, 0), (SPEC.chunk_tokens, layout.total_bytes))
        ]
        run = MappedRun(chunks, layout.total_bytes)
        found = fused._in_a_batch(Planes(sides), [run], SPEC.slab_layers, range(SHAPE[0]))
        assert (found is not None) == is_there


class Silent(torch.Tensor):
    """Refuses to tell of its storage, as wrappers do that have none."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.untyped_storage:
            raise TypeError("it has no storage")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("place", range(LAYERS))
@pytest.mark.parametrize(
    "odd", [tensor(SHAPE, SPEC.cache_dtype).as_subclass(Silent), np.zeros(SHAPE, np.uint16)], ids=["subclass", "array"]
)
def test_planes_that_are_no_plain_tensors_are_left_to_torch(place: int, odd: Any) -> None:
    side = [tensor(SHAPE, SPEC.cache_dtype) for _ in range(LAYERS)]
    assert placed_planes([side])
    side[place] = odd
    assert not placed_planes([side])


@pytest.mark.parametrize("last", ["of another device", "of another stride"])
def test_storages_of_tensors_that_are_not_alike_are_not_asked_for(monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """A fetch into a GPU's tensors, or into several layouts, would make an object for each tensor, for nothing."""
    tensors = [torch.zeros(SHAPE) for _ in range(LAYERS)]
    if last == "of another device":
        tensors = [torch.zeros(SHAPE, device="meta") for _ in range(LAYERS)]
    else:
        tensors[-1] = torch.zeros(SHAPE).mT
    is_negated = torch.Tensor.is_neg if last == "of another stride" else pytest.fail
    questions = Questions(is_negated, pytest.fail, pytest.fail, pytest.fail)
    monkeypatch.setattr(in_memory, "_asked_of_torch", lambda: ((torch.Tensor,), questions))
    assert in_memory.alike([(each, each) for each in tensors], 2) is None


RUNS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(1, 3)), min_size=1, max_size=8)


@given(RUNS)
def test_tensors_lie_apart_where_no_two_of_them_meet(runs: list[tuple[int, int, int]]) -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    tensors = [memory[start : start + length * step : step] for start, length, step in runs]
    covered = [set(range(start, start + length * step, step)) for start, length, step in runs]
    found = overlapping([Span.of(each) for each in tensors])
    meeting = {
        (one, other)
        for other in range(len(runs))
        for one in range(other)
        if covered[one] & covered[other]
    }  # fmt: skip
    assert (found in meeting) if meeting else found is None


@pytest.mark.parametrize("freed", range(2 * LAYERS))
def test_a_plane_whose_storage_was_freed_is_refused(freed: int) -> None:
    """As sharded training leaves them: a shape, and no memory behind it."""
    into = [(torch.zeros(SHAPE, dtype=torch.bfloat16), torch.zeros(SHAPE, dtype=torch.bfloat16)) for _ in range(LAYERS)]
    into[freed // 2][freed % 2].untyped_storage().resize_(0)
    with pytest.raises(InvalidRequest, match=rf"into\[{freed // 2}\] has no memory"):
        given_planes(WANTED, into)
