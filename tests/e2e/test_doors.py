"""Whatever a caller gives in the place of a tensor, through every door: refused by name, or right to the bit."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import AsyncClient, Client, Paged, StoreWriter, connect_async
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from tests.e2e.doors import BYTES_DOORS, COUNT, DOORS, Awaited, BytesDoor, Door, Visit, running_loop
from tests.e2e.odd_arrays import odd_arrays, plain, tensor
from tests.specs import bits, small_spec, tokens_of

pytestmark = pytest.mark.filterwarnings("ignore:.*(ComplexHalf|quantize|Sparse|writable).*:UserWarning")
FULL = os.environ.get("KVSTORE_TEST_SCALE") == "full"
SEEDS = itertools.count(100)
DTYPES = ["bfloat16", "float32", "float8_e4m3fn"]
OF_ASYNCIO = ("store-kv", "put_layer-kv-pages", "fetch_layers-into", "start_fetch_prefix-into")
"""The rest at full scale: behind them is the same client."""
OF_EVERY_DTYPE = ("store-kv", "put_layer-kv-pages", "fetch-into", "fetch-into-pages")
"""The rest at full scale: behind them are the same checks of a dtype."""
NO_ARRAYS = {
    "spec", "layers", "heads", "hidden_layers", "extras", "exactness", "verify", "durability", "segments", "hold",
    "readers", "ticket", "shards", "shard", "layer", "token_start", "runner", "step_tokens", "senders", "recompute",
    "logit_count", "namespace", "key", "keys", "replace", "timeout_s", "timeout", "dtype", "address", "kinds",
    "models", "after", "tenant", "self", "options", "args", "function", "receipt", "contexts",
}  # fmt: skip
"""What is a name, a number or a flag; each of ``contexts`` goes by the door of ``tokens``. An argument that is neither
here nor behind a door makes the test below fail."""
TOKENS = [
    "locate", "plan", "lookup", "peek", "fetch", "fetch_layers", "store", "start_store", "start_fetch_prefix",
    "start_fetch_segment",
    "store_segment", "fetch_segment", "fetch_segment_layers", "find_segments", "fetch_projected", "partial_prefill",
]  # fmt: skip
"""Methods whose ``tokens`` are given as every kind of array below."""
PREAMBLES = [
    "lookup", "start_fetch_segment", "store_segment", "fetch_segment", "fetch_segment_layers", "find_segments",
    "partial_prefill",
]  # fmt: skip
"""Methods that take a ``preamble``, likewise."""


def public(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in inspect.getmembers(kind, callable):
        if not name.startswith("_"):
            yield name, member


@pytest.mark.parametrize("kind", [Client, StoreWriter])
def test_every_argument_that_may_be_an_array_has_a_door(kind: type) -> None:
    doors = {(door.method, door.argument) for door in [*DOORS, *BYTES_DOORS]} | {(each, "tokens") for each in TOKENS}
    doors |= {(each, "preamble") for each in PREAMBLES}
    unknown = [
        (name, argument)
        for name, member in public(kind)
        for argument in inspect.signature(member).parameters
        if argument not in NO_ARRAYS and (name, argument) not in doors
    ]
    assert unknown == [], "give it a door in tests/e2e/doors.py, or say in NO_ARRAYS that it takes no arrays"


def test_the_asyncio_client_has_no_doors_of_its_own() -> None:
    own = {name for name, _ in public(AsyncClient)} - {name for name, _ in public(Client)}
    assert own == {"call", "wait", "aclose"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("door", DOORS, ids=str)
def test_refused_by_name_or_right_to_the_bit(client: Client, plane: str, door: Door, dtype: str) -> None:
    if dtype != "bfloat16" and not FULL and (plane == "remote" or str(door) not in OF_EVERY_DTYPE):
        pytest.skip("the other dtypes by this door at full scale")
    walk(client, door, dtype, is_brief=plane == "remote" or dtype != "bfloat16")


def test_the_asyncio_client_does_as_the_other(sidecar: Sidecar, plane: str) -> None:
    if plane == "remote" and not FULL:
        pytest.skip("by this plane at full scale")
    loop = running_loop()
    made = asyncio.run_coroutine_threadsafe(connect_async(sidecar.address), loop).result(30)
    try:
        for door in DOORS if FULL else [each for each in DOORS if str(each) in OF_ASYNCIO]:
            walk(Awaited(made, loop), door, "bfloat16", is_brief=True)
    finally:
        asyncio.run_coroutine_threadsafe(made.aclose(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)


def walk(client: Any, door: Door, dtype: str, *, is_brief: bool) -> None:
    """``is_brief``: of what is right, which costs a call or several, a part."""
    is_target = door.argument == "into"
    right = itertools.count()
    for odd in odd_arrays(dtype):
        if door.method == "put_hidden" and odd.name.endswith("no tokens"):
            continue  # a piece of the prompt like any other
        may = odd.as_target if is_target else odd.as_source
        if may and next(right) % 4 and is_brief and not FULL:
            continue
        value = odd.make(door.shape, dtype)
        what = f"{odd.name} through {door} of a {dtype} cache"
        try:
            found = door.use(Visit(client, dtype, next(SEEDS)), value)
            refusal = ""
        except InvalidRequest as error:
            refusal = error.message
        assert bool(refusal) != may, f"{what} was {f'refused: {refusal}' if refusal else 'taken'}"
        if refusal:
            assert all(word in refusal for word in odd.words), f"{what}: {refusal}"
            continue
        assert found.shape == value.shape, what
        assert (found == bits(value.detach() if isinstance(value, torch.Tensor) else value)).all(), what


@pytest.mark.parametrize("door", BYTES_DOORS, ids=str)
def test_bytes_are_right_to_the_byte_or_refused(client: Client, plane: str, door: BytesDoor) -> None:
    if plane == "remote" and not FULL:
        pytest.skip("by this plane at full scale: what is refused is refused before it is asked which plane")
    taken, refused = 0, []
    is_target = door.argument in ("into", "targets")
    for dtype in DTYPES if FULL else DTYPES[:1]:
        for odd in odd_arrays(dtype):
            value = odd.make((3, 5) if door.method == "put_encoder" else (2, 3, 5), dtype)
            what = f"{odd.name} through {door}"
            try:
                found = door.use(client, f"{next(SEEDS)}", value)
            except InvalidRequest:
                refused.append(odd.name)
                continue
            if value is None and door.method == "get_bytes":
                continue  # it is how one asks for memory of its own
            assert not must_refuse(odd.name, is_target), f"{what} was taken"
            assert found is not None, what
            assert found.tobytes() == content(value), what
            taken += 1
    assert taken > 5
    assert not {"torch bfloat16", "torch float16", "torch float32", "numpy <f4", "numpy <f2"} & set(refused)


def must_refuse(name: str, is_target: bool) -> bool:
    if name in ("None", "a number", "text", "a list", "an object", "numpy, masked", "torch, meta", "torch, sparse"):
        return True
    if name in ("numpy |O",):
        return True
    lost = ("read-only", "bytes", "one row for all", "backwards", "every other item", "between items")
    return is_target and name.endswith(lost)


def content(value: Any) -> bytes:
    """The bytes of a value, as whoever has it reads them."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(value).tobytes()


@pytest.mark.parametrize("found", ["float16", "bool", ">u2", "int16", "float32", "V2"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_dtype_that_is_named_is_not_believed_over_the_items_own(client: Client, kind: str, found: str) -> None:
    """``dtype=`` says what unsigned integers are, and nothing else."""
    if kind == "torch" and not hasattr(torch, found):
        pytest.skip("torch has no such dtype")
    value = np.zeros((2, 3), found) if kind == "numpy" else torch.zeros((2, 3), dtype=getattr(torch, found))
    with pytest.raises(InvalidRequest, match=f"{found}.*bfloat16"):
        client.put_encoder(small_spec(), "item", value, dtype="bfloat16")


def test_unsigned_integers_are_what_the_caller_says(client: Client) -> None:
    for number, value in enumerate((plain((2, 3), "bfloat16"), tensor((2, 3), "bfloat16"))):
        client.put_encoder(small_spec(), f"named-{number}", value, dtype="bfloat16").wait(10)
        found = client.get_encoder(small_spec(), f"named-{number}")
        assert found.dtype is torch.bfloat16
        assert (bits(found) == bits(value)).all()


# ---------------------------------------------------------------- places that share memory


def pool() -> Any:
    return torch.zeros(COUNT, 2, 2, 2, 8, dtype=torch.bfloat16)  # [tokens, layers, K and V, heads, dim]


def test_planes_that_share_memory_are_refused_and_interleaved_ones_are_not(client: Client) -> None:
    spec, tokens = small_spec(), tokens_of(COUNT, 1)
    kv = [(plain((2, COUNT, 8), "bfloat16"), plain((2, COUNT, 8), "bfloat16")) for _ in range(2)]
    client.store(spec, tokens, kv).wait(10)
    one, other = pool(), pool()
    apart = [tuple(one[:, layer, which].transpose(0, 1) for which in range(2)) for layer in range(2)]
    client.fetch(spec, tokens, into=apart)
    for got, want in zip(apart, kv, strict=True):
        assert all((bits(g) == w).all() for g, w in zip(got, want, strict=True))
    mine = other[:, 0, 0].transpose(0, 1)
    for into in (
        [(mine, mine), apart[1]],
        [apart[0], apart[0]],
        [(mine, other[:, 0, 1].transpose(0, 1)), (other[:, 1, 0].transpose(0, 1), mine)],
        [(mine, mine.view(torch.int16).numpy().view(np.uint16)), apart[1]],
    ):
        for call in (client.fetch, client.fetch_layers, client.start_fetch_prefix):
            with pytest.raises(InvalidRequest, match=r"into\[[01]\] .*share"):
                call(spec, tokens, into=into)


def test_layers_that_share_pages_are_refused(client: Client) -> None:
    spec, tokens = small_spec(), tokens_of(COUNT, 1)
    pages = np.zeros((2, 2, 10, 2, 8), np.uint16)
    for layers in (
        [pages, pages],
        [pages, pages[:, ::-1][:, ::-1]],
        [(pages[0], pages[0]), (pages[1], pages[1].copy())],
    ):
        layout = "kv page slot head dim" if not isinstance(layers[0], tuple) else "page slot head dim"
        with pytest.raises(InvalidRequest, match=r"layers\[[01]\] .*share"):
            client.fetch(spec, tokens, into=Paged(layers, np.arange(COUNT), layout))


def test_targets_of_values_that_share_memory_are_refused(client: Client) -> None:
    room = bytearray(100)
    view = memoryview(room)
    for targets in ([view[:60], view[50:]], [[view[:50], view[20:70]], bytearray(5)]):
        with pytest.raises(InvalidRequest, match=r"targets\[0\] .*share"):
            client.get_each("doors", ["a", "b"], targets)
    assert client.get_each("doors", ["a", "b"], [view[:50], view[50:]]) == [False, False]


# ---------------------------------------------------------------- tokens and slots

GOOD = np.arange(COUNT)
WRONG_TOKENS = {
    "float": GOOD.astype(np.float32), "bool": GOOD.astype(bool), "complex": GOOD.astype(complex),
    "object": GOOD.astype(object), "text": GOOD.astype(str), "two axes": GOOD.reshape(2, -1), "no axes": np.int64(3),
    "negative": GOOD - 1, "too large": GOOD + 990, "larger than any": GOOD.astype(np.uint64) + (1 << 63),
    "masked": np.ma.masked_array(GOOD), "None": None, "a string": "tokens", "ragged": [[1], [1, 2]],
    "torch float": torch.arange(COUNT, dtype=torch.float32), "torch bfloat16": torch.ones(COUNT, dtype=torch.bfloat16),
    "torch bool": torch.ones(COUNT, dtype=torch.bool), "torch meta": torch.arange(COUNT, device="meta"),
    "torch sparse": torch.arange(COUNT).to_sparse(), "torch two axes": torch.arange(COUNT)[None],
}  # fmt: skip
RIGHT_TOKENS = {
    "list": GOOD.tolist(), "int8": GOOD.astype(np.int8), "uint64": GOOD.astype(np.uint64),
    "big-endian": GOOD.astype(">i4"),
    "backwards": GOOD[::-1].copy()[::-1], "steps": np.repeat(GOOD, 2)[::2], "torch": torch.arange(COUNT),
    "torch uint8": torch.arange(COUNT, dtype=torch.uint8), "torch int32": torch.arange(COUNT, dtype=torch.int32),
    "range": range(COUNT),
}  # fmt: skip


class Projecting:
    """A runner as far as its arguments are looked at."""

    spec = small_spec(keeps_e=True, model_id="projecting", hidden_size=24)
    device = torch.device("cpu")

    def project_kv(self, *_: object) -> Any:
        raise AssertionError("nothing is stored")


def asked(client: Client, method: str, tokens: Any, **more: Any) -> Any:
    spec = small_spec()
    call = partial(getattr(client, method), **more)
    if method in ("fetch_projected", "partial_prefill"):
        return call(Projecting(), tokens)
    if method in ("store", "store_segment"):
        return call(spec, tokens, [(plain((2, COUNT, 8), "bfloat16"),) * 2] * 2)
    return call(spec, tokens)


@pytest.mark.parametrize("method", TOKENS)
def test_tokens_that_are_none_are_refused_by_every_call(client: Client, method: str) -> None:
    for name, tokens in WRONG_TOKENS.items():
        with pytest.raises(InvalidRequest, match="token"):
            asked(client, method, tokens)
            pytest.fail(f"{name} was taken")


@pytest.mark.parametrize("method", PREAMBLES)
def test_preambles_that_are_none_are_refused_by_every_call(client: Client, method: str) -> None:
    for name, tokens in WRONG_TOKENS.items():
        with pytest.raises(InvalidRequest, match="preamble"):
            asked(client, method, GOOD, preamble=tokens)
            pytest.fail(f"{name} was taken")


def test_tokens_mean_the_same_in_every_form(client: Client) -> None:
    kv = [(plain((2, COUNT, 8), "bfloat16"),) * 2] * 2
    client.store(small_spec(), GOOD, kv).wait(10)
    for name, tokens in RIGHT_TOKENS.items():
        assert client.lookup(small_spec(), tokens).prefix_token_count == COUNT, name


@pytest.mark.parametrize("name", [*WRONG_TOKENS, "two tokens in one"])
def test_slots_that_are_none_are_refused(client: Client, name: str) -> None:
    if name == "negative":
        pytest.skip("a negative slot says that its token is not wanted")
    spec, tokens = small_spec(), tokens_of(COUNT, 1)
    slots = WRONG_TOKENS.get(name, np.zeros(COUNT, int))
    pages = [np.zeros((2, 2, 10, 2, 8), np.uint16) for _ in range(2)]
    client.store(spec, tokens, [(plain((2, COUNT, 8), "bfloat16"),) * 2] * 2).wait(10)
    with pytest.raises(InvalidRequest, match="slot"):
        client.fetch(spec, tokens, into=Paged(pages, slots))
    assert not any(each.any() for each in pages)
