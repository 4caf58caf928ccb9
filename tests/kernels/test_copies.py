"""Copies by compiled code: the same bytes as numpy's, whatever the strides and the number of threads, and none
beside."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_copies import Blocks, batch, batch_of, compiled, is_compiled, tensors
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
    calls = made.calls(count) * threads
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
    first, *others = made.calls(4)
    first()
    assert 16 <= (target == source).all(axis=1).sum() <= 32, "a quarter, or two: then a caller may be interrupted"
    for call in others:
        call()
    assert (target == source).all()


def test_ends_that_do_not_fit_each_other_are_refused() -> None:
    one, other = np.zeros((2, 64), np.uint8), np.zeros((3, 64), np.uint8)
    with pytest.raises(AssertionError):
        batch_of([(Blocks.of(one), Blocks.of(other))], 1)


def test_a_library_of_another_release_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function has another number in its name."""
    monkeypatch.setattr(compiled, "compiled_path", lambda: np.random.mtrand.__file__)
    other = compiled.compiled_code.__wrapped__()
    monkeypatch.setattr(batch, "compiled_code", lambda: other)
    assert batch._copy.__wrapped__() is None
    monkeypatch.setattr(tensors, "compiled_path", compiled.compiled_path)
    assert tensors._compiled.__wrapped__() is None


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


def large(count: int) -> tuple[batch.Batch, Array, Array]:
    """A batch of ``count`` MiB, enough that a thread helps, and its ends."""
    source = np.random.default_rng(count).integers(0, 1 << 16, (count, 4, 1 << 17), np.uint16)
    target = np.zeros_like(source)
    made = batch_of([(Blocks.of(target), Blocks.of(source))], 2)
    assert made is not None
    return made, target, source


def test_what_the_helper_has_taken_is_there_when_the_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slices, one for each thread; the second is eight times as long."""
    monkeypatch.setattr(batch, "TAKEN_BYTES", 1 << 30)
    for _ in range(20):
        pairs, ends = [], []
        for size in (8 << 20, 64 << 20):
            source, target = np.full((1, size), 7, np.uint8), np.zeros((1, size), np.uint8)
            ends.append((target, source))
            pairs.append((Blocks.of(target), Blocks.of(source)))
        made = batch_of(pairs, 1)
        assert made is not None
        made._words[2] = 1  # slices at a time
        made.calls(1)[0]()
        assert all(target[0, -1] == 7 and (target == source).all() for target, source in reversed(ends))


def test_threads_that_copy_at_once_have_one_helper_and_all_their_bytes() -> None:
    batches = [large(count) for count in (3, 9, 5, 7)]
    for _ in range(20):
        for _, target, _ in batches:
            target[...] = 0
        running = [
            threading.Thread(target=run_by, args=(batch_of([(Blocks.of(target), Blocks.of(source))], 2), 1))
            for _, target, source in batches
        ]
        for each in running:
            each.start()
        for each in running:
            each.join()
        assert all((target == source).all() for _, target, source in batches)


FORKED = """
import os, sys, threading
import numpy as np
from kvstore_copies import Blocks, batch_of

source, target = np.full((32, 1 << 20), 3, np.uint8), np.zeros((32, 1 << 20), np.uint8)

def copy():
    batch_of([(Blocks.of(target), Blocks.of(source))], 1).calls(1)[0]()

def helpers():
    count = 0
    for each in os.listdir("/proc/self/task"):
        try:
            count += open(f"/proc/self/task/{each}/comm").read().strip() == "kvstore-copies"
        except FileNotFoundError:
            pass  # a thread that has just ended
    return count

copy()
is_over = threading.Event()
busy = threading.Thread(target=lambda: [copy() for _ in iter(is_over.is_set, True)], daemon=True)  # forks find it busy
busy.start()
before = helpers()
for _ in range(20):
    child = os.fork()
    if not child:
        target[...] = 0
        found = helpers()
        copy()
        os._exit(0 if (target == 3).all() and (found, helpers()) == (0, before) else 1)
    assert os.waitpid(child, 0)[1] == 0
is_over.set()
busy.join()
print(before, helpers())
"""


@pytest.mark.parametrize("processors", ["all", "one"])
def test_a_fork_starts_a_helper_of_its_own_and_one_processor_has_none(processors: str) -> None:
    some = sorted(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, timeout=60,
        preexec_fn=partial(os.sched_setaffinity, 0, some[:1] if processors == "one" else some),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1" if processors == "all" and len(some) > 1 else "0"] * 2
