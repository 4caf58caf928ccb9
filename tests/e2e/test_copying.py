"""The client's copy threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from kvstore_client import copying
from kvstore_client.copying import HERE_BYTES_MAX, Committed, Copier, commit_beside, commits_beside

from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.seams import WorkerThreads
from kvstore.spec import Durability
from tests.faulty_workers import WAYS, FaultyWorkers

WAIT_S = 10.0
MUCH = HERE_BYTES_MAX + 1


class Shared:
    """Pieces of work of which the helper takes one at least. ``fail_here``, ``fail_there``: the caller's pieces fail,
    or the helper's."""

    def __init__(self, *, fail_here: bool = False, fail_there: bool = False) -> None:
        self._fails = {True: fail_here, False: fail_there}
        self._mine = threading.current_thread()
        self.helps, self.may_end = threading.Event(), threading.Event()
        self.done: list[int] = []
        self.running = 0

    def __call__(self, piece: int) -> None:
        is_mine = threading.current_thread() is self._mine
        self.running += 1
        try:
            if is_mine:
                assert self.helps.wait(WAIT_S), "the helper has a piece"
            else:
                self.helps.set()
                self.may_end.wait(0.05)
            if self._fails[is_mine]:
                raise ValueError(piece)
            self.done.append(piece)
        finally:
            self.running -= 1


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier()
    yield made
    made.close()


def test_two_threads_share_pieces_and_each_is_done_once(copier: Copier) -> None:
    work = Shared()
    copier.share(work, range(40), MUCH, WAIT_S)
    assert sorted(work.done) == list(range(40))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_helper_that_never_helps_is_not_needed(way: object) -> None:
    workers = FaultyWorkers(WorkerThreads(1, "test-copy"))
    workers.fail(way)  # type: ignore[arg-type]
    done: list[int] = []
    Copier(workers).share(done.append, range(5), MUCH, WAIT_S)
    assert done == list(range(5))
    assert workers.hit
    workers.close()


def test_little_work_wakes_nobody() -> None:
    workers = FaultyWorkers(WorkerThreads(1, "test-copy"))
    threads: list[threading.Thread] = []
    Copier(workers).share(lambda _: threads.append(threading.current_thread()), range(5), HERE_BYTES_MAX, WAIT_S)
    assert threads == [threading.current_thread()] * 5
    assert not workers.names
    workers.close()


def test_pieces_that_a_helper_lost_are_not_said_to_be_done(copier: Copier) -> None:
    work = Shared(fail_there=True)
    with pytest.raises(KVStoreError):
        copier.share(work, range(40), MUCH, WAIT_S)
    assert not work.running


def test_who_fails_waits_for_the_helper_which_takes_nothing_more(copier: Copier) -> None:
    work = Shared(fail_here=True)
    with pytest.raises(ValueError, match=r"\d"):
        copier.share(work, range(40), MUCH, WAIT_S)
    assert not work.running
    assert len(work.done) < 39, "the rest is nobody's"


def test_a_helper_that_hangs_is_waited_for_so_long_and_no_longer(copier: Copier) -> None:
    helps, over, mine = threading.Event(), threading.Event(), threading.current_thread()

    def hang(_: int) -> None:
        if threading.current_thread() is mine:
            assert helps.wait(WAIT_S)
        else:
            helps.set()
            over.wait(WAIT_S)

    with pytest.raises(DeadlineExceeded):
        copier.share(hang, range(4), MUCH, 0.05)
    over.set()


def test_torch_keeps_to_the_copiers_threads_and_leaves_the_engines_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    copier = Copier()
    try:
        assert copier.submit(torch.get_num_threads).result(10.0) == 1
        assert torch.get_num_threads() == 3
    finally:
        copier.close()
        torch.set_num_threads(before)


def test_who_is_interrupted_twice_waits_for_the_helper(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    work, real = Shared(), copying.wait

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(copying, "wait", real)
        raise KeyboardInterrupt

    def piece(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert work.helps.wait(WAIT_S), "the helper has a piece"
            raise KeyboardInterrupt
        work(number)

    monkeypatch.setattr(copying, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copier.share(piece, range(2), MUCH, WAIT_S)
    assert not work.running


def test_a_client_is_closed_while_another_thread_of_it_stores() -> None:
    workers, interval = WorkerThreads(1, "commits"), sys.getswitchinterval()
    has_ended, receipts = threading.Event(), []

    def commit() -> Committed:
        return Durability.MEMORY, 1, ""

    def store() -> None:
        receipts.append(commit_beside(workers, commit, lambda: None, waits=True))

    def store_on() -> None:
        while not has_ended.is_set():
            store()

    for _ in range(500):
        store()
    storing = [threading.Thread(target=store_on) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for each in storing:
            each.start()
        assert not any(wait(commits_beside(workers), WAIT_S).not_done for _ in range(100))
    finally:
        has_ended.set()
        sys.setswitchinterval(interval)
        for each in storing:
            each.join()
        workers.close()
