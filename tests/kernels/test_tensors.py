"""Where tensors lie, told by compiled code: as torch says, or not at all."""

from __future__ import annotations

import ctypes
import sys
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvstore_copies import Alike, Questions, alike_columns, is_compiled, tensors

pytestmark = pytest.mark.skipif(
    not is_compiled() or not hasattr(torch.Tensor, tensors.ATTRIBUTE),
    reason="kvstore was installed without a C compiler, or this torch has no table for DLPack",
)
SIZES = st.lists(st.integers(0, 4), max_size=4)
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn])
LOOKS = st.tuples(SIZES, DTYPES, st.permutations(range(4)), st.integers(0, 3))


TORCHS = Questions(
    torch.Tensor.is_neg, torch.Tensor.untyped_storage, torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes
)


def in_columns(given: list[Any], width: int = 1, kind: type = torch.Tensor) -> Alike | None:
    """As rows: ``given`` is column after column."""
    count = len(given) // width
    return alike_columns([tuple(given[row::count]) for row in range(count)], width, kind)


def made(look: tuple[list[int], torch.dtype, list[int], int]) -> torch.Tensor:
    sizes, dtype, order, skipped = look
    whole = torch.zeros([skipped + 4, *sizes], dtype=torch.uint8).to(dtype)[skipped:]
    return whole[0].permute([axis for axis in order if axis < len(sizes)])


def kind(each: torch.Tensor) -> tuple[Any, ...]:
    return each.dtype, each.shape, each.stride()


@given(st.lists(LOOKS, min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_addresses_are_told_where_all_are_like_the_first(looks: list[Any], chosen: list[int]) -> None:
    """Tensors of one look are made anew for each place, so that each lies elsewhere."""
    given = [made(looks[number % len(looks)]) for number in chosen]
    found = in_columns(given)
    if all(kind(each) == kind(given[0]) for each in given) and all(each.data_ptr() for each in given):
        assert found is not None
        assert list(found.addresses) == [each.data_ptr() for each in given]
    else:
        assert found is None


@given(LOOKS, LOOKS, st.integers(1, 3), st.integers(0, 5))
def test_tensors_are_like_the_first_of_their_kind(k: Any, v: Any, count: int, odd: int) -> None:
    """K and V of some layers, and then the same with one of them like those of the other kind."""
    given = [*(made(k) for _ in range(count)), *(made(v) for _ in range(count))]
    have_memory = all(each.data_ptr() for each in given)
    found = in_columns(given, 2)
    begins = [each.data_ptr() for each in given]
    assert (None if found is None else list(found.addresses)) == (begins if have_memory else None)
    place = odd % len(given)
    given[place] = made(v if place < count else k)
    if count > 1 and kind(made(k)) != kind(made(v)):
        assert in_columns(given, 2) is None


@given(st.lists(st.integers(0, 300), min_size=2, max_size=40, unique=True))
def test_the_smallest_distance_is_told_in_any_order(begins: list[int]) -> None:
    """Each begins at its own byte of one buffer."""
    whole = torch.zeros(400, dtype=torch.uint8)
    found = in_columns([whole[begin : begin + 4] for begin in begins])
    assert found is not None
    assert list(found.addresses) == [whole.data_ptr() + begin for begin in begins], "in the order of what was given"
    assert found.distance == min(after - before for before, after in pairwise(sorted(begins)))


def freed() -> torch.Tensor:
    found = torch.zeros(4)
    found.untyped_storage().resize_(0)
    return found


ODD = {
    "sparse": lambda: torch.zeros(4).to_sparse(),
    "on no device": lambda: torch.zeros(4, device="meta"),
    "freed": freed,
    "of nine axes": lambda: torch.zeros(9 * (1,)),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(4)]),
    "numpy's": lambda: np.zeros(4, np.float32),
    "no tensor": lambda: 4.0,
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_has_no_plain_memory_is_not_told(name: str, is_first: bool) -> None:
    odd = ODD[name]()
    assert in_columns([odd]) is None
    assert in_columns([odd, torch.zeros(4)] if is_first else [torch.zeros(4), odd]) is None
    assert in_columns([torch.zeros(4)]) is not None, "nothing is left of the failure"


def test_wrapped_tensors_are_not_told() -> None:
    told: list[Any] = []

    def look(each: torch.Tensor) -> torch.Tensor:
        told.append(in_columns([each]))
        return each

    torch.func.vmap(look)(torch.zeros(3, 4))
    assert told == [None]


ENTRIES = {
    "longer": lambda k, v: (k, v, v), "shorter": lambda k, v: [k], "a tensor": lambda k, v: torch.zeros(2, 4),
    "of a class of its own": lambda k, v: Pair(k, v), "of other tensors": lambda k, v: (k, torch.nn.Parameter(v)),
}  # fmt: skip


class Pair(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("place", [0, 2])
def test_entries_are_plain_pairs(name: str, place: int) -> None:
    entries: list[Any] = [(torch.zeros(4), torch.zeros(4)), [torch.zeros(4), torch.zeros(4)], (torch.zeros(4),) * 2]
    assert alike_columns(entries, 2, torch.Tensor) is not None
    entries[place] = ENTRIES[name](*entries[place])
    assert alike_columns(entries, 2, torch.Tensor) is None


def test_columns_are_told_with_their_rooms_and_storages() -> None:
    """Of each column, the bytes of the tensor that has the fewest behind its begin."""
    entries = [(torch.zeros(90)[skipped : skipped + 4], torch.zeros(8, 4)[row]) for skipped, row in ((3, 0), (80, 5))]
    found = alike_columns(entries, 2, torch.Tensor, TORCHS)
    assert found is not None
    columns = [*zip(*entries, strict=True)]
    assert [list(map(id, ours)) for ours in found.columns] == [list(map(id, theirs)) for theirs in columns]
    assert list(found.rooms) == [10 * 4, 12 * 4]
    assert [each.data_ptr() for each in found.storages] == [each.untyped_storage().data_ptr() for each in found.tensors]
    before = [sys.getrefcount(each) for each in found.tensors]
    for _ in range(10):
        alike_columns(entries, 2, torch.Tensor, TORCHS)
    assert [sys.getrefcount(each) for each in found.tensors] == before


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("place", [0, 3])
def test_a_question_that_fails_or_says_no_tells_nothing(number: int, place: int) -> None:
    """At the first tensor, and at the last."""
    entries, asked = [(torch.zeros(4), torch.zeros(4)) for _ in range(2)], list[Any]()

    def fails(each: Any) -> object:
        asked.append(each)
        if len(asked) == place + 1:
            raise RuntimeError("it cannot tell")
        return TORCHS[number](each)

    questions = Questions(*[fails if each == number else TORCHS[each] for each in range(4)])
    assert alike_columns(entries, 2, torch.Tensor, questions) is None
    assert len(asked) == place + 1
    assert alike_columns(entries, 2, torch.Tensor, TORCHS._replace(is_odd=lambda each: True)) is None
    assert alike_columns(entries, 2, torch.Tensor, TORCHS) is not None


def test_no_tensors_have_no_addresses() -> None:
    assert alike_columns([], 2, torch.Tensor) is None


def test_another_kind_of_capsule_is_no_table() -> None:
    kind = type("Kind", (), {tensors.ATTRIBUTE: torch.zeros(4).__dlpack__()})
    assert in_columns([kind()], kind=kind) is None


def test_the_function_that_all_of_the_process_share_is_left_as_others_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever declared it for capsules of his own would get another type, or a TypeError."""
    shared = ctypes.pythonapi.PyCapsule_GetPointer
    monkeypatch.setattr(shared, "argtypes", [ctypes.py_object])
    monkeypatch.setattr(shared, "restype", ctypes.c_char_p)
    assert tensors._table_of.__wrapped__(torch.Tensor) == tensors._table_of(torch.Tensor) != 0
    assert shared.argtypes == [ctypes.py_object]
    assert shared.restype is ctypes.c_char_p


class Told(ctypes.Structure):
    """DLPack's DLTensor, by its own header."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


LOOK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Told))


class Table(ctypes.Structure):
    """DLPack's DLPackExchangeAPI, by its own header."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("prev_api", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p), ("from_object", ctypes.c_void_p), ("to_object", ctypes.c_void_p),
        ("dltensor_from_object", LOOK), ("current_work_stream", ctypes.c_void_p),
    )  # fmt: skip


def pair(first: int, second: int) -> Any:
    return (ctypes.c_int64 * 2)(first, second)


OTHERWISE = {
    "as it is": ({}, True), "pinned": ({"device_type": 3}, True), "CUDA's": ({"device_type": 2}, False),
    "ROCm's": ({"device_type": 10}, False), "managed by CUDA": ({"device_type": 13}, False),
    "empty": ({"data": 0}, False), "of another code": ({"code": 4}, False), "of other bits": ({"bits": 32}, False),
    "of more lanes": ({"lanes": 2}, False), "of fewer axes": ({"ndim": 1}, False),
    "without strides": ({"strides": None}, False), "shorter": ({"shape": pair(3, 8)}, False),
    "narrower": ({"shape": pair(4, 7)}, False), "of other steps": ({"strides": pair(9, 1)}, False),
    "spread": ({"strides": pair(8, 2)}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_each_field_of_a_table_is_looked_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The last of three differs. No machine of the tests has the devices."""
    shape, strides = pair(4, 8), pair(8, 1)
    changes, is_told = OTHERWISE[name]

    def look(number: int, found: Any) -> int:
        told = Told(1000 * (number + 1), 1, 0, 2, 2, 16, 1, shape, strides, 24)
        for field, value in changes.items() if number == 2 else ():
            setattr(told, field, value)
        found[0] = told
        return 0

    table = Table(major=1, minor=9, dltensor_from_object=LOOK(look))
    monkeypatch.setattr(tensors, "_table_of", lambda _: ctypes.addressof(table))
    found = in_columns([0, 1, 2], kind=int)
    assert (None if found is None else list(found.addresses)) == ([1024, 2024, 3024] if is_told else None)


def test_a_table_that_fails_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Table(major=1, minor=9, dltensor_from_object=LOOK(lambda _, __: -1))
    monkeypatch.setattr(tensors, "_table_of", lambda _: ctypes.addressof(fails))
    assert in_columns([0], kind=int) is None


def test_a_table_of_another_major_version_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (torch.zeros(8, dtype=torch.int32).numpy() + 2).astype(np.uint32)  # version 2.2, and no function
    monkeypatch.setattr(tensors, "_table_of", lambda kind: words.ctypes.data)
    assert in_columns([torch.zeros(4)]) is None


def test_without_compiled_code_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_compiled", lambda: None)
    assert in_columns([torch.zeros(4)]) is None
