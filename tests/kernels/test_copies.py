"""Copies by compiled code: the same bytes as numpy's, whatever the strides and the number of threads, and none
beside."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_copies import Blocks, batch, batch_of, compiled, is_compiled
from numpy.typing import NDArray

from tests.conftest import ROOT

Array = NDArray[np.generic]
pytestmark = pytest.mark.skipif(not is_compiled(), reason="kvstore was installed without a C compiler")
GUARD = 0xA5


def strided(
    memory: NDArray[np.uint8], shape: Sequence[int], order: Sequence[int], gap: int, skip: int, size: int
) -> Array:
    """Return an array in memory, ``skip`` bytes behind its start, whose axes lie in this order, with ``gap`` unused
    items behind each."""
    steps, step = [0] * len(shape), size
    for axis in order:
        steps[axis] = step
        step *= shape[axis]
        step += gap * size
    needed = skip + step * 2
    assert needed <= memory.size, "the test's own memory is too small"
    return np.ndarray(shape, f"u{size}", memory.data, skip, steps)


def run_by(made: batch.Batch, threads: int, count: int = 1) -> None:
    """Run all calls, shared by threads."""
    calls = made.calls(count, threads)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not calls:
                    return
                call = calls.pop()
            call()

    running = [threading.Thread(target=work) for _ in range(threads)]
    for each in running:
        each.start()
    for each in running:
        each.join()


@settings(deadline=None, max_examples=300)
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4), row=st.integers(1, 80), size=st.sampled_from([1, 2, 4]),
    orders=st.tuples(st.randoms(use_true_random=False), st.randoms(use_true_random=False)),
    gaps=st.tuples(st.integers(0, 3), st.integers(0, 3)), skips=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    pieces=st.sampled_from([0, 1, 7, 1 << 20]), threads=st.integers(1, 3), count=st.integers(1, 9),
    streams=st.booleans(),
)  # fmt: skip
def test_the_bytes_are_numpys_and_none_beside_is_touched(
    shape: list[int], row: int, size: int, orders: tuple[object, object], gaps: tuple[int, int],
    skips: tuple[int, int], pieces: int, threads: int, count: int, streams: bool,
) -> None:  # fmt: skip
    shape = [*shape, row]
    ends = []
    for order, gap, skip in zip(orders, gaps, skips, strict=True):
        axes = list(range(len(shape) - 1))
        order.shuffle(axes)  # type: ignore[attr-defined]  # hypothesis's own Random
        memory = np.full(1 << 21, GUARD, np.uint8)
        ends.append((memory, strided(memory, shape, [len(shape) - 1, *axes], gap, skip * size, size)))
    (into, target), (_, source) = ends
    source[...] = np.random.default_rng(row).integers(1, 250, source.shape)
    expected = into.copy()
    np.ndarray(target.shape, target.dtype, expected.data, skips[0] * size, target.strides)[...] = source
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "TAKEN_BYTES", pieces or 1)
        patch.setattr(batch, "STREAM_BYTES", 0 if streams else 1 << 30)
        made = batch_of([(Blocks.of(target), Blocks.of(source))], size)
    if made is None:  # too many axes, or rows too short: said so, not copied wrongly
        assert row * size < batch.ROW_BYTES_MIN or len(shape) > batch.AXES_MAX
        return
    run_by(made, threads, count)
    assert (into == expected).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_copies_of_several_kinds_are_one_batch(threads: int) -> None:
    """Blocks of several shapes, and enough bytes for stores that pass the caches by."""
    pairs, ends = [], []
    for number, (shape, skip) in enumerate([((30, 3, 2, 4096), 3), ((1, 5, 7, 333), 1), ((7, 900, 1, 64), 0)]):
        source = np.random.default_rng(number).integers(0, 1 << 16, shape, np.uint16)
        target = np.zeros(source.size + 64, np.uint16)[skip : skip + source.size].reshape(shape)
        ends.append((target, source))
        pairs.append((Blocks.of(target), Blocks.of(source)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "STREAM_BYTES", 1 << 20)
        made = batch_of(pairs, 2)
    assert made is not None
    run_by(made, threads)
    for target, source in ends:
        assert (target == source).all()


def test_numbered_entries_of_several_arrays() -> None:
    pages = [np.zeros((9, 4, 2, 32), np.uint16) for _ in range(3)]
    content = np.random.default_rng(1).integers(0, 1 << 16, (3, 2, 2, 4, 2, 32), np.uint16)
    numbers = np.array([[7, 0], [3, 8]])
    targets = Blocks.at(numbers, pages)
    assert targets is not None
    made = batch_of([(targets, Blocks.of(content, 3))], 2)
    assert made is not None
    run_by(made, 1)
    for layer, each in enumerate(pages):
        assert (each[numbers] == content[layer]).all()
        assert not np.delete(each, numbers.reshape(-1), axis=0).any()


def test_arrays_of_several_strides_are_left_to_others() -> None:
    assert Blocks.at(np.arange(2), [np.zeros((3, 4, 64)), np.zeros((3, 64, 4)).transpose(0, 2, 1)]) is None


def test_a_call_copies_so_much_and_all_calls_all() -> None:
    source, target = np.arange(1 << 20, dtype=np.uint8).reshape(64, -1), np.full((64, 1 << 14), 255, np.uint8)
    source %= 251
    made = batch_of([(Blocks.of(target), Blocks.of(source))], 1)
    assert made is not None
    first, *others = made.calls(4, 2)
    first()
    assert (target == source).all(axis=1).sum() == 16, "a quarter: then a caller may be interrupted"
    for call in others:
        call()
    assert (target == source).all()


def test_ends_that_do_not_fit_each_other_are_refused() -> None:
    one, other = np.zeros((2, 64), np.uint8), np.zeros((3, 64), np.uint8)
    with pytest.raises(AssertionError):
        batch_of([(Blocks.of(one), Blocks.of(other))], 1)


def test_a_library_of_another_release_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function has another number in its name."""
    monkeypatch.setattr(compiled, "find_spec", lambda _: SimpleNamespace(origin=np.random.mtrand.__file__))
    other = compiled.compiled_code.__wrapped__()
    monkeypatch.setattr(batch, "compiled_code", lambda: other)
    assert batch._copy.__wrapped__() is None


def test_without_compiled_code_there_is_no_batch() -> None:
    program = (
        "import numpy as np; from kvstore_copies import Blocks, batch_of, is_compiled; "
        "a = Blocks.of(np.zeros((2, 64))); print(is_compiled(), batch_of([(a, a)], 8))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "KVSTORE_COPIES": "plain"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "None"]
