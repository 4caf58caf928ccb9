"""Copies between the caller's tensors and mapped memory: two threads, GIL released.

Compiled code makes all copies of a call where it was built and memory lies regularly (``kvstore_copies``), with a
thread of its own that helps the caller's. The others are torch's when the process has torch: on rows of 64 KiB it moves
about twice what numpy does. Without torch, numpy.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import cache, partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from kvstore_copies import Batch
from numpy.typing import NDArray

from kvstore.chunk import Part, PartPlace
from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.seams import SystemClock, Workers, WorkerThreads
from kvstore.seams.jobs import NotBegun, begun, failure_of
from kvstore.seams.scheduler import run_for, start_thread
from kvstore.spec import Durability
from kvstore_client.arrays import (
    Tensor,
    dtype_of,
    is_shareable,
    is_tensor,
    raw_array,
    settle_device,
    torch_module,
)
from kvstore_client.tracing import within_trace

COPY_THREADS = 2
HERE_BYTES_MAX = 8 << 20
"""The most bytes that are copied on the calling thread alone: to wake another thread takes as long."""
CALL_BYTES = 64 << 20
"""The bytes that one call of compiled code copies: a caller can be interrupted between two calls."""
SIGNED_TYPES = {1: "int8", 2: "int16", 4: "int32"}
Result = TypeVar("Result")
Work = TypeVar("Work")
Committed = tuple[Durability, int, str]
"""The outcome of a store: its durability, the number of leading tokens that have it, and why no more have it."""
_own = threading.local()
_clock = SystemClock()
_waiting: WeakKeyDictionary[Workers, set[Future[Committed]]] = WeakKeyDictionary()
"""Commits under way on threads of their own, by the ``Workers`` that commit for the same client. Plain sets: several
threads change them, each by a single operation, while another lists them."""


def raw(value: Tensor) -> Tensor:
    """Return a view of the same memory as plain integers of its item size: a tensor when the process has torch, else an
    array. Copies run between two raw views, so that no dtype is ever converted."""
    torch = torch_module()
    if torch is None:
        return raw_array(value)
    if isinstance(value, torch.Tensor):
        return value.view(dtype_of(SIGNED_TYPES[value.element_size()]))
    if not value.flags.writeable or not is_shareable(value):
        value = np.array(value)
    return torch.from_numpy(value.view(f"i{value.itemsize}"))


def copy(target: Tensor, source: Tensor) -> None:
    """``target[:] = source``; both came from ``raw`` and have one shape. Releases the GIL. A copy from the host to
    a GPU has ended on return: torch brings the bytes there, and puts them in their places by a kernel that it does not
    wait for."""
    assert target.shape == source.shape, "a copy of another shape would be repeated"
    if is_tensor(target):
        target.copy_(source)
        if target.is_cuda and not source.is_cuda:
            settle_device([target])
    else:
        np.copyto(target, source)


def whole(plane: Tensor) -> Tensor:
    """Return a raw plane for many small copies: numpy's view, whose slices cost a fifth, or a GPU's tensor itself.
    Raises torch's error for a tensor whose storage was resized to less than it needs: numpy does not look there."""
    if not is_tensor(plane):
        return plane
    return plane if plane.is_cuda else raw_array(plane.as_strided(plane.shape, plane.stride()).numpy())


def copy_small(target: Tensor, source: NDArray[np.generic]) -> None:
    """Set ``target[:] = source``, where ``target`` is a slice of a plane from ``whole``. A read-only ``source`` is not
    copied first, which torch would need."""
    if is_tensor(target):
        plainly(copy, target, raw(source))
    else:
        np.copyto(target, source)


def plane_run(plane: Tensor, start: int, chunk_tokens: int, chunk_count: int, part: Part | PartPlace) -> Tensor:
    """Return the tokens of ``part`` in each of ``chunk_count`` chunks, as [chunks, heads, tokens, dim]. A view.

    ``plane``: raw [heads, tokens, dim]; ``start``: the first chunk's first token.
    """
    if chunk_count == 1:
        return plane[None, :, start + part.token_start : start + part.token_stop]
    run = plane[:, start : start + chunk_tokens * chunk_count]
    heads, _, dim = run.shape
    if is_tensor(run):
        split = run.unflatten(1, (chunk_count, chunk_tokens)).transpose(0, 1)
    else:
        split = run.reshape(heads, chunk_count, chunk_tokens, dim).swapaxes(0, 1)
    return split[:, :, part.token_start : part.token_stop]


def plainly(function: Callable[..., Result], *args: object) -> Result:
    """Run a copy without autograd's bookkeeping; only so may tensors made in inference mode be written."""
    torch = torch_module()
    if torch is None:
        return function(*args)
    with torch.inference_mode():
        return function(*args)


@cache
def _limit_of_this_thread() -> Callable[[int], object] | None:
    """Return the function that limits the threads of the calling thread's copies. torch brings it; torch's own call
    limits every thread."""
    found: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    return found


def _on_this_thread(function: Callable[..., Result], *args: object) -> Result:
    """Run a copy entirely on this thread of the copier. Two threads suffice for a copy; torch would split each copy
    over all processors, and wait for the slowest."""
    torch = torch_module()
    if torch is not None and not hasattr(_own, "torch_is_alone"):
        _own.torch_is_alone = True
        torch.get_num_threads()  # torch sets a thread's count at the first call, and would override a limit set before
        limit = _limit_of_this_thread()
        if limit is not None:
            limit(1)
    return plainly(function, *args)


def on_callers_thread(function: Callable[..., Result], *args: object) -> Result:
    """Run a copy entirely on the calling thread: where the processors are busy, torch's own threads come late. The
    thread count of the caller's other work is unchanged."""
    torch = torch_module()
    limit = None if torch is None else _limit_of_this_thread()
    if torch is None or limit is None:
        return plainly(function, *args)
    count = torch.get_num_threads()  # of this thread; the call makes torch set it now, not later over the limit
    try:
        limit(1)
        return plainly(function, *args)
    finally:
        limit(count)


def wait_all(copies: Sequence[Future[Result]], timeout_s: float) -> None:
    """Return when all copies have ended well. Raises the error of a failed copy once none runs any more, also where the
    caller is interrupted; DeadlineExceeded while a copy may still be running."""
    try:
        _, late = wait(copies, timeout_s)
    except BaseException as error:
        if not stopped(copies, timeout_s):
            raise _still_running(timeout_s) from error
        raise
    if late:
        for future in late:
            future.cancel()
        raise _still_running(timeout_s)
    for future in copies:
        check(future)


def check(copy: Future[Result]) -> None:
    """Raise the failure of a copy that has ended; return if it ended well."""
    failure = failure_of(copy)
    try:
        if failure is not None:
            raise failure
    finally:
        del failure, copy  # an error keeps the frames it passes, and they would keep these


def stopped(copies: Iterable[Future[Result]], timeout_s: float | None) -> bool:
    """Cancel the copies that have not begun, and wait for the others (``timeout_s`` None: without limit). Returns False
    while a copy may still be running. Whoever is interrupted meanwhile still waits: the copies may write to memory that
    is given back. The interrupt is raised once none runs any more; where one still may, False goes before it."""
    running = [each for each in copies if not each.cancel()]
    until_s = None if timeout_s is None else _clock.monotonic() + timeout_s
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            late = wait(running, None if until_s is None else max(0.0, until_s - _clock.monotonic())).not_done
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None and not late:
        raise interrupt
    return not late


def _still_running(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the copies did not finish within {timeout_s} s")


def commit_beside(
    workers: Workers, commit: Callable[[], Committed], abort: Callable[[], None], *, waits: bool
) -> Future[Committed]:
    """Run a commit after those sent before. With ``waits`` it gets a thread of its own, because the stores that it
    waits for may be queued behind it. Where no thread takes it the store is aborted at once, and the outcome says
    so."""
    future = begun(_OwnThread() if waits else workers, within_trace(commit))
    if waits:
        waiting = _waiting.setdefault(workers, set())
        waiting.add(future)
        future.add_done_callback(waiting.discard)
    if future.done() and isinstance(refusal := failure_of(future), NotBegun):
        abort()
        future = Future()
        future.set_result((Durability.NONE, 0, refusal.message))
    return future


class _OwnThread:
    """``Workers`` that start a thread for each call."""

    def submit(self, function: Callable[..., Result], /, *args: object) -> Future[Result]:
        future: Future[Result] = Future()
        start_thread(partial(run_for, future, function, *args), "kvstore-commit-waiting")
        return future

    def close(self) -> None:
        return None


def commits_beside(workers: Workers) -> set[Future[Committed]]:
    """Return the commits that run on threads of their own now."""
    return _waiting.get(workers, set()).copy()


def _do_some(function: Callable[[Work], None], left: deque[Work], undone: list[None]) -> None:
    """Take pieces of shared work until none is left. ``undone`` loses an item per piece that is done."""
    while True:
        try:
            piece = left.popleft()
        except IndexError:
            return
        function(piece)
        undone.pop()


def _do_all(function: Callable[[Work], None], work: Iterable[Work]) -> None:
    for piece in work:
        function(piece)


def _await_helper(helper: Future[None], undone: Sequence[None], timeout_s: float) -> None:
    """Wait for a helper, which takes no new piece. Its failure counts only where a piece is undone: a helper that was
    refused, or never woke up, has touched nothing."""
    try:
        wait_all([helper], timeout_s)
    except KVStoreError:
        if undone:
            raise


def calls_of(batch: Batch) -> list[Callable[[], None]]:
    """Return the calls of compiled code that make all copies."""
    return batch.calls(max(1, batch.byte_count // CALL_BYTES))


class Copier:
    """Runs batches of copies on at most two threads."""

    def __init__(self, workers: Workers | None = None) -> None:
        self._workers = workers or WorkerThreads(COPY_THREADS, "kvstore-copy")

    def submit(self, function: Callable[..., Result], /, *args: object) -> Future[Result]:
        """Begin a copy. Never raises: where no thread is to be had, the copy has failed."""
        return begun(self._workers, _on_this_thread, function, *args)

    def split(self, function: Callable[[Sequence[Work]], None], work: Sequence[Work], timeout_s: float) -> None:
        """Run ``function`` over two halves of ``work``, interleaved, and wait. Raises as ``wait_all`` does."""
        wait_all(self.halves(function, work), timeout_s)

    def share(
        self, function: Callable[[Work], None], work: Iterable[Work], byte_count: int, timeout_s: float, *,
        by_torch: bool = True,
    ) -> None:  # fmt: skip
        """Run ``function`` over each piece of ``work``, on the calling thread and, where all of it is much
        (``byte_count``), on one that helps as soon as it is awake. Where no thread helps, the caller does it all.
        ``by_torch``: torch or numpy may make copies; else compiled code makes all of them, with a thread of its own.
        Returns when all pieces are done. Raises the error of a failed copy, or the caller's, once none runs any more;
        DeadlineExceeded while one may still be running."""
        if not by_torch:
            _do_all(function, work)
            return
        if byte_count <= HERE_BYTES_MAX:
            on_callers_thread(_do_all, function, work)
            return
        left = deque(work)
        undone = [None] * len(left)
        helper: Future[None] | None = None
        try:
            helper = self.submit(_do_some, function, left, undone)
            on_callers_thread(_do_some, function, left, undone)
            if not helper.cancel():
                _await_helper(helper, undone, timeout_s)
        except DeadlineExceeded:
            raise
        except BaseException as error:
            left.clear()
            if helper is not None and not stopped([helper], timeout_s):
                raise _still_running(timeout_s) from error
            raise

    def halves(self, function: Callable[[Sequence[Work]], None], work: Sequence[Work]) -> list[Future[None]]:
        """Begin ``function`` over two halves of ``work``, interleaved. Never raises, but where the caller is
        interrupted: then once none of them runs."""
        copies: list[Future[None]] = []
        try:
            for start in range(min(COPY_THREADS, len(work))):
                copies.append(self.submit(function, work[start::COPY_THREADS]))
        except BaseException:
            stopped(copies, None)
            raise
        return copies

    def close(self) -> None:
        self._workers.close()
