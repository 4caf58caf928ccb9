"""Work of the caller that has not ended: a store keeps what it will give, a fetch overwrites nothing that it reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor as WorkerPool
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from kvstore_client import AsyncClient, Client, Paged
from kvstore_client.cuda import lanes
from kvstore_client.streams import within_streams

from kvstore.seams import WorkerThreads
from tests.gpu.tensors import cache_on, long_kernel, own_stream, poisoned, same, seeds
from tests.specs import small_spec, tokens_of

pytestmark = pytest.mark.gpu

SPEC = small_spec(model_id="gpu-streams", chunk_tokens=64)
COUNT = 512
STREAMS = pytest.mark.parametrize("is_own", [False, True], ids=["default stream", "own stream"])


def stream_of(device: str, is_own: bool) -> Any:
    return own_stream(device if is_own else "cpu")


def targets(device: str) -> list[Any]:
    shape = (2, COUNT, 8)
    return [(poisoned(device, shape, "bfloat16"), poisoned(device, shape, "bfloat16")) for _ in range(2)]


@STREAMS
def test_a_store_keeps_what_kernels_on_their_way_will_give(client: Client, device: str, is_own: bool) -> None:
    seed = next(seeds)
    kv, cache = cache_on(device, SPEC, COUNT, seed)
    with stream_of(device, is_own):
        given = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in kv]
        long_kernel(device)
        for pair, computed in zip(given, kv, strict=True):
            for plane, value in zip(pair, computed, strict=True):
                plane.copy_(value)
        receipt = client.store(SPEC, tokens_of(COUNT, seed), given)
        for pair in given:
            for plane in pair:
                plane.fill_(1)  # the call is over: they may be reused at once
    receipt.wait(10.0)
    same(client.fetch(SPEC, tokens_of(COUNT, seed), verify=True), cache)


@STREAMS
def test_pages_that_are_being_written_are_stored_as_they_will_be(client: Client, device: str, is_own: bool) -> None:
    seed = next(seeds)
    kv, cache = cache_on(device, SPEC, COUNT, seed)
    with stream_of(device, is_own):
        pages = [torch.zeros((2, COUNT // 16, 16, 2, 8), dtype=torch.bfloat16, device=device) for _ in range(2)]
        long_kernel(device)
        for page, pair in zip(pages, kv, strict=True):
            for half, plane in zip(page, pair, strict=True):
                half.copy_(plane.transpose(0, 1).unflatten(0, (-1, 16)))
        receipt = client.store(SPEC, tokens_of(COUNT, seed), Paged(pages, torch.arange(COUNT)))
        for page in pages:
            page.fill_(1)
    receipt.wait(10.0)
    same(client.fetch(SPEC, tokens_of(COUNT, seed), verify=True), cache)


@STREAMS
def test_a_store_layer_by_layer_keeps_what_kernels_will_give(client: Client, device: str, is_own: bool) -> None:
    seed = next(seeds)
    kv, cache = cache_on(device, SPEC, COUNT, seed)
    with stream_of(device, is_own):
        writer = client.start_store(SPEC, tokens_of(COUNT, seed))
        for layer, (k, v) in enumerate(kv):
            given = torch.zeros_like(k), torch.zeros_like(v)
            long_kernel(device)
            given[0].copy_(k)
            given[1].copy_(v)
            writer.put_layer(layer, given)
            given[0].fill_(1)
            given[1].fill_(1)
        receipt = writer.commit()
    receipt.wait(10.0)
    assert receipt.stored_token_count == COUNT, receipt.reason
    same(client.fetch(SPEC, tokens_of(COUNT, seed), verify=True), cache)


def test_tensors_that_are_freed_right_after_the_call(client: Client, device: str) -> None:
    """torch gives their memory to the next tensors of their size, while the store may still be on its way."""
    seed = next(seeds)
    kv, cache = cache_on(device, SPEC, COUNT, seed)
    receipt = client.store(SPEC, tokens_of(COUNT, seed), kv)
    shape = kv[0][0].shape
    del kv
    others = [poisoned(device, tuple(shape), "bfloat16") for _ in range(8)]
    receipt.wait(10.0)
    same(client.fetch(SPEC, tokens_of(COUNT, seed), verify=True), cache)
    assert len(others) == 8


@STREAMS
@pytest.mark.parametrize("way", ["fetch", "start_fetch_prefix"])
def test_a_fetch_waits_for_kernels_that_read_its_target(client: Client, device: str, is_own: bool, way: str) -> None:
    seed = next(seeds)
    kv, cache = cache_on(device, SPEC, COUNT, seed)
    _, before = cache_on("cpu", SPEC, COUNT, next(seeds))
    client.store(SPEC, tokens_of(COUNT, seed), kv).wait(10.0)
    with stream_of(device, is_own):
        into = targets(device)
        for pair, arrays in zip(into, before, strict=True):
            for plane, array in zip(pair, arrays, strict=True):
                plane.copy_(torch.from_numpy(array.view("i2")).view(torch.bfloat16))
        read = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in into]
        long_kernel(device)
        for pair, copies in zip(into, read, strict=True):
            for plane, copied in zip(pair, copies, strict=True):
                copied.copy_(plane)
        if way == "fetch":
            assert client.fetch(SPEC, tokens_of(COUNT, seed), into=into).token_count == COUNT
        else:
            client.start_fetch_prefix(SPEC, tokens_of(COUNT, seed), into=into).wait(10.0)
        after = [(k.clone(), v.clone()) for k, v in into]
    same(read, before)
    same(after, cache)


@STREAMS
@pytest.mark.parametrize("form", ["planes", "pages"])
def test_each_layer_may_be_used_as_soon_as_it_was_waited_for(
    client: Client, device: str, is_own: bool, form: str
) -> None:
    seed = next(seeds)
    kv, cache = cache_on(device, SPEC, COUNT, seed)
    client.store(SPEC, tokens_of(COUNT, seed), kv).wait(10.0)
    with stream_of(device, is_own):
        into: Any = targets(device)
        if form == "pages":
            pages = [poisoned(device, (2, COUNT // 16, 16, 2, 8), "bfloat16") for _ in range(2)]
            into = Paged(pages, torch.arange(COUNT))
        transfer = client.start_fetch_prefix(SPEC, tokens_of(COUNT, seed), into=into)
        used = []
        for layer in range(2):
            k, v = transfer.wait_layer(layer, 10.0)
            used.append((k.clone(), v.clone()))  # on the caller's stream
        transfer.wait(10.0)
    if form == "pages":
        used = [(k.flatten(0, 1).transpose(0, 1), v.flatten(0, 1).transpose(0, 1)) for k, v in used]
    same(used, cache)


def test_layers_of_a_stream_are_there_when_they_are_given(client: Client, device: str) -> None:
    seed = next(seeds)
    kv, cache = cache_on(device, SPEC, COUNT, seed)
    client.store(SPEC, tokens_of(COUNT, seed), kv).wait(10.0)
    with own_stream(device):
        into = targets(device)
        used = [(k.clone(), v.clone()) for _, (k, v) in client.fetch_layers(SPEC, tokens_of(COUNT, seed), into=into)]
    same(used, cache)


def test_two_threads_with_a_stream_each(client: Client, device: str) -> None:
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for seed in range(first, first + 4):
                with own_stream(device):
                    kv, cache = cache_on(device, SPEC, COUNT, seed)
                    long_kernel(device)
                    doubled = [(k.clone(), v.clone()) for k, v in kv]
                    client.store(SPEC, tokens_of(COUNT, seed), doubled).wait(10.0)
                    into = targets(device)
                    assert client.fetch(SPEC, tokens_of(COUNT, seed), into=into).token_count == COUNT
                    same(into, cache)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(next(seeds) * 1000,)) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60.0)
    assert not failures, failures
    assert not any(each.is_alive() for each in threads)


@STREAMS
async def test_awaited_calls_wait_for_the_callers_stream(client: Client, device: str, is_own: bool) -> None:
    """They run on another thread, which has other streams."""
    seed, asked = next(seeds), AsyncClient(client, WorkerThreads(2, "test-async"))
    kv, cache = cache_on(device, SPEC, COUNT, seed)
    with stream_of(device, is_own):
        given = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in kv]
        long_kernel(device)
        for pair, computed in zip(given, kv, strict=True):
            for plane, value in zip(pair, computed, strict=True):
                plane.copy_(value)
        receipt = await asked.store(SPEC, tokens_of(COUNT, seed), given)
        into = targets(device)
        long_kernel(device)
        for pair in into:
            for plane in pair:
                plane.fill_(1)  # on its way: the fetch must come after it
        receipt.wait(10.0)
        found = await asked.fetch(SPEC, tokens_of(COUNT, seed), into=into)
        assert found.token_count == COUNT
        after = [(k.clone(), v.clone()) for k, v in into]
    same(after, cache)
    asked._threads.close()


class StreamOf(NamedTuple):
    device: int
    name: str


class Cuda:
    """torch.cuda as a process sees it that has four GPUs. ``streams``: by thread and device. ``contexts``: the GPUs on
    which there is a context, because they were made current; ``device`` goes back to no other."""

    def __init__(self) -> None:
        self.streams: dict[tuple[int, int], str] = {}
        self.contexts: set[int] = set()
        self._own = threading.local()

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 4

    def current_device(self) -> int:
        return getattr(self._own, "device", 0)

    def current_stream(self, device: int) -> StreamOf:
        return StreamOf(device, self.streams.get((threading.get_ident(), device), "default"))

    def default_stream(self, device: int) -> StreamOf:
        return StreamOf(device, "default")

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        before = self.current_device()
        self._set(device)
        yield
        if before in self.contexts:
            self._set(before)
        else:
            self._own.device = before

    @contextmanager
    def stream(self, stream: StreamOf) -> Iterator[None]:
        before, kept = self.current_device(), self.current_stream(stream.device)
        self._set(stream.device)
        self.streams[threading.get_ident(), stream.device] = stream.name
        yield
        self.streams[threading.get_ident(), stream.device] = kept.name
        self._set(before)

    def _set(self, device: int) -> None:
        if device != self.current_device():
            self.contexts.add(device)
        self._own.device = device


def test_another_thread_works_on_the_callers_device_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)

    def seen() -> tuple[int, Any, Any]:
        return cuda.current_device(), cuda.current_stream(1), cuda.current_stream(2)

    one, two = StreamOf(1, "a"), StreamOf(2, "b")
    with WorkerPool() as pool, cuda.device(2), cuda.stream(one), cuda.stream(two):
        assert pool.submit(within_streams(seen)).result() == (2, one, two)
        assert pool.submit(seen).result() == (0, StreamOf(1, "default"), StreamOf(2, "default"))
    assert cuda.contexts == {1, 2}, "a context takes some 500 MiB of a GPU: other processes may use the others"


def test_copies_make_no_context_on_another_gpu_and_end_whatever_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's own device is the first one, unless somebody says otherwise; and a second Ctrl-C may come soon."""
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    ended: list[str] = []

    class Lane(StreamOf):
        def synchronize(self) -> None:
            if not ended:
                ended.append("interrupted")
                raise KeyboardInterrupt
            ended.append(self.name)

    gpu = torch.device("cuda:3")
    monkeypatch.setattr(lanes._lanes, "of", {gpu: [Lane(3, "one"), Lane(3, "two")]})
    cuda_device = cuda.device
    monkeypatch.setattr(cuda, "device", lambda device: cuda_device(device.index))

    def fails() -> None:
        assert cuda.current_device() == 3
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lanes.run_on(gpu, [fails])
    assert ended == ["interrupted", "one", "two"]
    assert cuda.contexts == {3}
