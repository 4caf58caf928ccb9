"""The client's own threads fail, each job in turn: what comes is right to the bit, a miss or a typed error; and when a
call returns nothing touches the caller's tensors, or staging that is somebody else's by then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, connect, copying
from kvstore_client.copying import Copier
from kvstore_client.loading.call import Asked
from kvstore_client.planes.shared_memory import landing
from kvstore_client.planes.shared_memory import store as staged
from kvstore_client.prompt import Prompt
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import KVStoreError, Unavailable
from kvstore.seams import Workers, WorkerThreads
from kvstore.spec import Durability
from tests.faulty_workers import WAYS, FaultyWorkers, Job, cancelled, refused
from tests.seams.test_jobs import no_more_threads
from tests.specs import bits, random_cache, small_spec, tokens_of

SPEC = small_spec()
COUNT = 40
WAIT_S = 20.0
_seeds = count(1000)


class Seen:
    """Threads whose jobs a test can look at."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.jobs: list[Future[Any]] = []

    def submit(self, function: Job, /, *args: object) -> Future[Any]:
        self.jobs.append(self._workers.submit(function, *args))
        return self.jobs[-1]

    def close(self) -> None:
        self._workers.close()

    def assert_idle(self) -> None:
        assert all(job.done() for job in self.jobs)


class Rig:
    """A client whose threads fail as they are told, and another one that looks at what it left."""

    def __init__(self, address: str) -> None:
        self.client, self.other = connect(address, timeout_s=WAIT_S), connect(address)
        context = self.client._context
        context.copier.close()
        context.committer.close()
        self.threads = Seen(WorkerThreads(2, "test-copy"))
        self.copies = FaultyWorkers(self.threads)
        self.commits = FaultyWorkers(WorkerThreads(1, "test-commit"))
        self.client._context = replace(context, copier=Copier(self.copies), committer=self.commits)

    def fresh(self) -> tuple[Any, list[Any]]:
        """A prompt that nobody stored, and its cache."""
        seed = next(_seeds)
        return tokens_of(COUNT, seed), random_cache(SPEC, COUNT, seed)

    def stored(self) -> tuple[Any, list[Any]]:
        tokens, kv = self.fresh()
        assert self.other.store(SPEC, tokens, kv).wait(WAIT_S) is Durability.MEMORY
        return tokens, kv

    def assert_right(self, tokens: Any, kv: list[Any], *, whole: bool) -> None:
        """As another client sees it."""
        found = self.other.fetch(SPEC, tokens, verify=True)
        assert found.token_count == COUNT if whole else found.token_count in (0, 16, 32, COUNT)
        assert_same(found, kv, found.token_count)

    def assert_balanced(self) -> None:
        """What was reserved and leased comes back."""
        ends = time.monotonic() + WAIT_S
        while True:
            stats = self.other.stats()
            if (stats.sessions.reservation_count, stats.sessions.lease_count) == (0, 0):
                return
            assert time.monotonic() < ends, stats.sessions
            time.sleep(0.02)

    def close(self) -> None:
        self.client.close()
        self.other.close()


@pytest.fixture
def rig(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(copying, "HERE_BYTES_MAX", 0)  # small caches take the threads of large ones
    rig = Rig(sidecar.address)
    yield rig
    rig.close()


def assert_same(found: list[Any], kv: list[Any], token_count: int) -> None:
    for layer, (k, v) in enumerate(found):
        assert (bits(k)[:, :token_count] == bits(kv[layer][0])[:, :token_count]).all()
        assert (bits(v)[:, :token_count] == bits(kv[layer][1])[:, :token_count]).all()


def job_count(workers: FaultyWorkers, act: Callable[[], object]) -> int:
    """How many jobs a call takes when none fails."""
    workers.names.clear()
    act()
    return len(workers.names)


def put_all(client: Client, tokens: Any, kv: list[Any]) -> tuple[Durability, int]:
    """A store, layer by layer."""
    with client.start_store(SPEC, tokens) as writer:
        for layer, planes in enumerate(kv):
            writer.put_layer(layer, planes)
        receipt = writer.commit()
        return receipt.wait(WAIT_S), receipt.stored_token_count


def put_once(client: Client, tokens: Any, kv: list[Any]) -> tuple[Durability, int]:
    receipt = client.store(SPEC, tokens, kv)
    return receipt.wait(WAIT_S), receipt.stored_token_count


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_fetch_of_which_a_copy_fails_has_no_holes(rig: Rig, way: Any) -> None:
    tokens, kv = rig.stored()
    jobs = job_count(rig.copies, lambda: rig.client.fetch(SPEC, tokens))
    assert jobs == (1 if rig.client.plane == "local" else 0), "the caller's own thread copies, and one may help"
    for target in range(jobs):
        into = [tuple(np.full_like(bits(plane), 7) for plane in layer) for layer in kv]
        rig.copies.fail(way, target)
        try:
            found = rig.client.fetch(SPEC, tokens, into=into)
        except KVStoreError:
            found = None
        rig.threads.assert_idle()
        if found is not None and found.token_count:  # the helper was not needed
            assert found.token_count == COUNT
            assert_same(into, kv, COUNT)
        assert rig.copies.hit
        assert_same(rig.client.fetch(SPEC, tokens), kv, COUNT)
    rig.assert_balanced()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_layers_of_which_a_copy_fails_are_not_shown(rig: Rig, way: Any) -> None:
    tokens, kv = rig.stored()
    for target in range(job_count(rig.copies, lambda: list(rig.client.fetch_layers(SPEC, tokens)))):
        rig.copies.fail(way, target)
        shown = []
        with pytest.raises(KVStoreError):
            for layer, planes in rig.client.fetch_layers(SPEC, tokens):
                shown.append(layer)
                assert_same([planes], [kv[layer]], COUNT)
        assert len(shown) < len(kv)
        rig.threads.assert_idle()
    rig.assert_balanced()


@pytest.mark.parametrize("put", [put_once, put_all])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("whose", ["copies", "commits"])
def test_a_store_of_which_a_job_fails_keeps_what_is_right_or_nothing(rig: Rig, whose: str, way: Any, put: Any) -> None:
    workers: FaultyWorkers = getattr(rig, whose)
    for target in range(job_count(workers, lambda: put(rig.client, *rig.fresh()))):
        tokens, kv = rig.fresh()
        workers.fail(way, target)
        try:
            level, kept = put(rig.client, tokens, kv)
        except (KVStoreError, OSError, MemoryError, RuntimeError):
            level, kept = Durability.NONE, 0
        assert workers.hit
        rig.threads.assert_idle()
        rig.assert_right(tokens, kv, whole=kept == COUNT)
        assert (level is Durability.NONE) == (kept == 0)
        if whose == "copies" or way in (refused, cancelled):
            rig.assert_balanced()  # at once: what no thread took is dropped, not left to expire
        again, fine = rig.fresh()
        assert put(rig.client, again, fine) == (Durability.MEMORY, COUNT), "the next store has staging of its own"
        rig.assert_right(again, fine, whole=True)


def slowly(rig: Rig) -> None:
    """The copies that run take their time, in Python."""
    real = rig.threads.submit

    def submit(function: Job, /, *args: object) -> Future[Any]:
        def late() -> Any:
            time.sleep(0.2)
            return function(*args)

        return real(late)

    rig.threads.submit = submit  # type: ignore[method-assign]  # a slow thread


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("act", ["fetch", "store", "put"])
def test_who_is_refused_a_thread_waits_for_the_copies_that_run(rig: Rig, act: str) -> None:
    """They read the caller's tensors, or write to them, or to staging that would be the next store's."""
    tokens, kv = rig.stored() if act == "fetch" else rig.fresh()
    slowly(rig)
    rig.copies.fail(refused, 1)
    if act == "fetch":
        assert rig.client.fetch(SPEC, tokens).token_count in (0, COUNT)
    else:
        put = put_once if act == "store" else put_all
        put(rig.client, tokens, kv)
    rig.threads.assert_idle()
    rig.assert_right(tokens, kv, whole=act == "fetch")


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("act", ["fetch", "store"])
def test_who_is_interrupted_leaves_no_copy_behind(rig: Rig, act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, kv = rig.stored() if act == "fetch" else rig.fresh()
    slowly(rig)
    real = copying.wait

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(copying, "wait", real)
        raise KeyboardInterrupt

    if rig.client.plane == "remote":
        pytest.skip("by the remote plane the caller waits for gRPC, not for copies")
    monkeypatch.setattr(copying, "wait", interrupted)
    calls = {"fetch": lambda: rig.client.fetch(SPEC, tokens), "store": lambda: rig.client.store(SPEC, tokens, kv)}
    with pytest.raises(KeyboardInterrupt):
        calls[act]()
    rig.threads.assert_idle()
    rig.assert_right(tokens, kv, whole=act == "fetch")
    rig.assert_balanced()


@pytest.mark.parametrize("act", ["layers", "values"])
def test_who_is_interrupted_while_copies_are_begun_leaves_none_behind(
    rig: Rig, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rig.client.plane == "remote" and act == "layers":
        pytest.skip("by the remote plane the caller's own thread copies")
    tokens, kv = rig.stored()
    keys, data = [f"interrupted {next(_seeds)}" for _ in range(2)], np.ones(1 << 20, np.uint8)
    assert all(rig.other.put_each("test", keys, [data] * 2))
    monkeypatch.setattr(landing, "JOB_BYTES", 1)  # each layer is a job
    slowly(rig)
    real, places = rig.threads.submit, [tuple(np.zeros_like(bits(plane)) for plane in layer) for layer in kv]

    def submit(function: Job, /, *args: object) -> Future[Any]:
        if rig.threads.jobs:
            raise KeyboardInterrupt
        return real(function, *args)

    rig.threads.submit = submit  # type: ignore[method-assign]  # an interrupt between two copies
    with pytest.raises(KeyboardInterrupt):
        if act == "layers":
            list(rig.client.fetch_layers(SPEC, tokens, into=places))
        else:
            rig.client.get_each("test", keys, [np.zeros_like(data) for _ in keys])
    rig.threads.assert_idle()
    rig.assert_balanced()


@pytest.mark.usefixtures("by_torch")
def test_a_copy_that_hangs_is_never_a_miss_for_who_gave_the_memory(rig: Rig) -> None:
    """It may write there later: who takes a miss puts what he computes into the same memory."""
    if rig.client.plane == "remote":
        pytest.skip("by the remote plane the caller's own thread copies")
    tokens, kv = rig.stored()
    rig.client._context = replace(rig.client._context, timeout_s=0.2)
    mine, taken, over = threading.current_thread(), threading.Event(), threading.Event()

    def hang() -> None:
        if threading.current_thread() is mine:
            assert taken.wait(WAIT_S), "the helper has a piece"
        else:
            taken.set()
            over.wait(WAIT_S)

    rig.client.faults.arm("fetch.copy.middle", hang)
    assert rig.client.fetch(SPEC, tokens).token_count == 0, "memory of ours is thrown away"
    taken.clear()
    with pytest.raises(KVStoreError, match="put nothing there"):
        rig.client.fetch(SPEC, tokens, into=[tuple(np.zeros_like(bits(plane)) for plane in layer) for layer in kv])
    over.set()


def test_staging_under_a_copy_that_hangs_is_used_no_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    if rig.client.plane == "remote":
        pytest.skip("there is no staging by the remote plane")
    session = rig.client.connect_now()
    tokens, kv = rig.fresh()
    rig.client._context = replace(rig.client._context, timeout_s=0.2)
    mine, taken, over = threading.current_thread(), threading.Event(), threading.Event()

    def hang(copy: Callable[[], None]) -> None:
        if threading.current_thread() is mine:
            assert taken.wait(WAIT_S), "the helper has a piece"
            copy()
        else:
            taken.set()
            over.wait(WAIT_S)

    with monkeypatch.context() as patch:
        patch.setattr(staged, "call", hang)
        assert put_once(rig.client, tokens, kv) == (Durability.NONE, 0)
    rig.client._context = replace(rig.client._context, timeout_s=WAIT_S)
    assert not session.is_usable
    assert put_once(rig.client, tokens, kv) == (Durability.MEMORY, COUNT)
    rig.assert_right(tokens, kv, whole=True)
    over.set()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_values_of_which_a_job_fails_are_whole_or_nothing(rig: Rig, way: Any) -> None:
    data = np.random.default_rng(next(_seeds)).integers(0, 256, 9 << 20, np.uint8)  # three chunks

    def put(key: str) -> bool:
        return rig.client.put_bytes("threads", key, data, durability=Durability.MEMORY).wait(WAIT_S) > Durability.NONE

    def get(client: Client, key: str) -> Any:
        return client.get_bytes("threads", key, verify=True)

    for workers in (rig.copies, rig.commits):
        for target in range(job_count(workers, lambda: put(f"clean {way.__name__}"))):
            key = f"{way.__name__} {id(workers)} {target}"
            workers.fail(way, target)
            try:
                is_kept = put(key)
            except (KVStoreError, OSError, MemoryError, RuntimeError):
                is_kept = False
            rig.threads.assert_idle()
            found = get(rig.other, key)
            assert (found is not None) == is_kept
            assert found is None or (found == data).all()
    assert put("whole")
    for target in range(job_count(rig.copies, lambda: get(rig.client, "whole"))):
        rig.copies.fail(way, target)
        try:
            found = get(rig.client, "whole")
        except KVStoreError:
            found = None
        rig.threads.assert_idle()
        assert found is None or (found == data).all()
    assert (get(rig.client, "whole") == data).all()


def test_without_a_thread_of_its_own_a_call_is_a_miss_or_a_typed_error(
    rig: Rig, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, kv = rig.stored()
    held = rig.client.lookup(SPEC, tokens, hold=True)
    assert held.ticket is not None
    fresh, cache = rig.fresh()
    writers = [rig.client.start_store(SPEC, fresh, shards=2)]
    writers.append(rig.client.join_store(writers[0].ticket, 1))
    for writer, heads in zip(writers, [(0, 1), (1, 2)], strict=True):
        for layer, (k, v) in enumerate(cache):
            writer.put_layer(layer, (k[slice(*heads)], v[slice(*heads)]), heads=heads)
    earlier = rig.client.store(SPEC, tokens, kv)
    planned = Prompt.of(SPEC, tokens, (), None), Asked(COUNT, 0, (), "observe")
    later, late_cache = rig.fresh()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        assert earlier.stored_token_count == COUNT
        earlier.wait(WAIT_S)  # it asks the sidecar: whatever comes of that, later calls are not to wait for it
        stored = rig.client.store(SPEC, later, late_cache)
        assert stored.stored_token_count == COUNT or "thread" in stored.reason
        with pytest.raises(Unavailable, match="thread"):
            rig.client.start_fetch(held.ticket)
        assert rig.client.planner.begin(*planned) is None, "it is looked up like a prompt without a plan"
        with pytest.raises(Unavailable, match="thread"):
            rig.client.watch()
        with pytest.raises(KVStoreError):
            connect(sidecar.address, timeout_s=2.0)
        absent = connect(sidecar.address, timeout_s=2.0, required=False)
        assert absent.fetch(SPEC, tokens).token_count == 0
        receipt = writers[0].commit()
        assert receipt.wait(WAIT_S) is Durability.NONE
        assert "thread" in receipt.reason
    writers[1].abort()
    absent.close()
    rig.client.release_ticket(held.ticket)
    with rig.client.planner.begin(*planned) as call:
        assert call.answer.found.hit_count == COUNT // SPEC.chunk_tokens
    assert rig.client.store(SPEC, later, late_cache).wait(WAIT_S) is Durability.MEMORY
    rig.assert_right(fresh, cache, whole=False)
    rig.assert_balanced()
    assert_same(rig.client.fetch(SPEC, tokens), kv, COUNT)
