"""Memory that is digested, also in the pass that copies it: the library's digests, of what was written, and no byte
beside."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_copies import checked, copy_checked, digests_of, is_compiled, keyed_words
from numpy.typing import NDArray

from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(
    not is_compiled() or checked._compiled("kvstore_copy_checked_1") is None,
    reason="kvstore was installed without a C compiler, or the processor has no AVX2",
)
GUARD = 0xA5
SEEDS = st.one_of(st.sampled_from([0, 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
STRIPES = st.one_of(st.integers(4, 50), st.sampled_from([16, 17, 32, 33, 1024]))


def spans(stripes: Sequence[int], gaps: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where pieces of so many stripes begin and end, with a gap of so many bytes before each."""
    lengths = np.array(stripes, np.int64) * checked.STRIPE_BYTES
    stops = np.cumsum(lengths + np.array(gaps[: len(stripes)], np.int64))
    return stops - lengths, stops


@settings(deadline=None, max_examples=300)
@given(
    stripes=st.lists(STRIPES, min_size=1, max_size=6), gaps=st.lists(st.sampled_from([0, 0, 1, 64]), min_size=6),
    seeds=st.lists(SEEDS, min_size=6), skips=st.tuples(st.integers(0, 70), st.integers(0, 70)), streams=st.booleans(),
)  # fmt: skip
def test_digests_are_the_librarys_and_no_byte_beside_is_touched(
    stripes: list[int], gaps: list[int], seeds: list[int], skips: tuple[int, int], streams: bool
) -> None:
    starts, stops = spans(stripes, gaps)
    end = int(stops[-1])
    source = np.random.default_rng(end).integers(0, 256, end + 71, np.uint8)[skips[0] :]
    memory = np.full(end + 256, GUARD, np.uint8)
    begin = -memory.ctypes.data % 64 + (0 if streams else skips[1])  # only whole lines are streamed
    expected = memory.copy()
    for start, stop in zip(starts, stops, strict=True):
        expected[begin + start : begin + stop] = source[start:stop]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked, "STREAM_BYTES", 0 if streams else 1 << 30)
        found = copy_checked(memory[begin:], source, starts, stops, seeds[: len(stripes)])
    wanted = [
        xxhash.xxh3_128_digest(source[start:stop].tobytes(), seed)
        for start, stop, seed in zip(starts, stops, seeds, strict=False)
    ]
    assert found == b"".join(wanted)
    assert (memory == expected).all()
    source.flags.writeable = memory.flags.writeable = False
    for each in (source, memory[begin:]):
        assert digests_of(each, starts, stops, seeds[: len(stripes)]) == found, "where it lies"


@given(key=st.binary(min_size=32, max_size=32), messages=st.lists(st.binary(min_size=8, max_size=8), max_size=9))
def test_seeds_are_the_librarys(key: bytes, messages: list[bytes]) -> None:
    rows = np.frombuffer(b"".join(messages), np.uint8).reshape(-1, 8)
    wanted = [int.from_bytes(blake3(each, key=key).digest(8), "little") for each in messages]
    assert keyed_words(key, rows) == wanted
    assert keyed_words(key, np.repeat(rows, 2, axis=0)[::2]) == wanted, "rows that lie apart"


@pytest.mark.parametrize(("key", "shape"), [(31, (2, 8)), (33, (2, 8)), (32, (2, 7)), (32, (2, 9))])
def test_other_keys_and_messages_are_refused(key: int, shape: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        keyed_words(bytes(key), np.zeros(shape, np.uint8))


@pytest.mark.parametrize("skip", [0, 16], ids=["streamed", "not on whole lines"])
def test_what_is_digested_is_what_was_written(skip: int) -> None:
    """Somebody writes the source all the time. Runs of this size are streamed where each line is whole."""
    source = np.random.default_rng(3).integers(0, 256, 8 << 20, np.uint8)
    assert source.size >= checked.STREAM_BYTES
    original, ended = source.copy(), threading.Event()
    room = np.zeros(source.size + 128, np.uint8)
    begin = -room.ctypes.data % 64 + skip
    target = room[begin : begin + source.size]

    def write() -> None:
        while not ended.is_set():
            np.invert(source, out=source)

    writer = threading.Thread(target=write)
    writer.start()
    starts, torn = np.arange(0, source.size, 1 << 16), 0
    try:
        for seed in range(3000):  # where processors are busy the writer may long have none
            found = copy_checked(target, source, starts, starts + (1 << 16), [seed] * starts.size)
            assert found == b"".join(xxhash.xxh3_128_digest(target[at : at + (1 << 16)].data, seed) for at in starts)
            torn += 0 < int((target == original).sum()) < target.size
            if torn and seed >= 30:
                break
    finally:
        ended.set()
        writer.join()
    assert torn, "the source was written during a copy"


@pytest.mark.parametrize("length", [0, 64, 192, 255, 257, 4097])
def test_other_lengths_are_left_to_others(length: int) -> None:
    """The library's digest of up to 240 bytes is another function, and one of odd lengths reads bytes twice."""
    source, target = np.ones(8192, np.uint8), np.zeros(8192, np.uint8)
    starts, stops = np.array([0, 1024]), np.array([1024, 1024 + length])
    assert copy_checked(target, source, starts, stops, [1, 2]) is None
    assert digests_of(source, starts, stops, [1, 2]) is None
    assert not target.any()


def test_memory_that_does_not_lie_in_one_piece_is_left_to_others() -> None:
    apart = np.zeros(2048, np.uint8)[::2]
    assert copy_checked(apart, np.ones(1024, np.uint8), np.array([0]), np.array([1024]), [1]) is None
    assert copy_checked(np.ones(1024, np.uint8), apart, np.array([0]), np.array([1024]), [1]) is None
    assert digests_of(apart, np.array([0]), np.array([1024]), [1]) is None
    assert not apart.any()


@pytest.mark.parametrize(
    ("starts", "stops", "seeds"),
    [
        ([0, 512], [1024], [1, 2]),
        ([0], [1024], []),
        ([0], [2048], [1]),
        ([-512], [512], [1]),
        ([0, 512], [512, 1088], [1, 2]),
    ],
)
def test_pieces_outside_the_memory_are_refused(starts: list[int], stops: list[int], seeds: list[int]) -> None:
    source, target = np.ones(4096, np.uint8), np.zeros(1024, np.uint8)
    for one, other in ((target, source), (source, target)):
        with pytest.raises(AssertionError):
            copy_checked(one, other, np.array(starts), np.array(stops), seeds)
    with pytest.raises(AssertionError):
        digests_of(target, np.array(starts), np.array(stops), seeds)


def test_a_target_that_may_not_be_written_is_refused() -> None:
    target = np.zeros(1024, np.uint8)
    target.flags.writeable = False
    with pytest.raises(AssertionError):
        copy_checked(target, np.ones(1024, np.uint8), np.array([0]), np.array([1024]), [1])
    assert not target.any()


def test_a_library_of_another_release_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions have another number in their names."""
    other = ctypes.CDLL(np.random.mtrand.__file__)
    monkeypatch.setattr(checked, "compiled_code", lambda: other)
    assert checked._compiled.__wrapped__("kvstore_copy_checked_1") is None


def test_without_compiled_code_nothing_is_copied() -> None:
    program = (
        "import numpy as np; from kvstore_copies import copy_checked, keyed_words; "
        "a = np.zeros(1024, np.uint8); where = np.array([0]), np.array([1024]), [1]; "
        "print(copy_checked(a, a + 1, *where), a.any(), keyed_words(bytes(32), a.reshape(-1, 8)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "KVSTORE_COPIES": "plain"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["None", "False", "None"]
