"""Memory that CUDA was given: it is taken back before others may get its addresses. A stand-in for CUDA's runtime."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_client.cuda import pinned, runtime

from kvstore.seams.mapping import SharedMap


class Runtime:
    """Remembers what is registered. ``interrupts``: what comes while CUDA works, seen once it has ended."""

    def __init__(self, reason: str = "", interrupts: type[BaseException] | None = None) -> None:
        self.reason, self.interrupts = reason, interrupts
        self.calls: list[str] = []
        self.there: set[int] = set()

    def register(self, address: int, byte_count: int, flags: int) -> str:
        self.calls.append("register")
        if not self.reason:
            self.there.add(address)
        if self.interrupts is not None:
            raise self.interrupts
        return self.reason

    gpu = 0

    def unregister(self, address: int, gpu: int) -> None:
        self.calls.append("unregister")
        self.there.discard(address)


@pytest.fixture
def mapping() -> Iterator[list[SharedMap]]:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 8192)
    yield [SharedMap(descriptor, 8192, writable=False)]
    os.close(descriptor)


@pytest.mark.parametrize("interrupts", [None, KeyboardInterrupt])
def test_what_was_registered_is_taken_back_before_it_is_unmapped(
    mapping: list[SharedMap], monkeypatch: pytest.MonkeyPatch, interrupts: type[BaseException] | None
) -> None:
    """Else CUDA would copy from the pages that lay there, whatever is mapped there next."""
    cuda = Runtime(interrupts=interrupts)
    monkeypatch.setattr(pinned, "runtime", lambda: cuda)
    try:
        pinned.pin(mapping[0].bytes[100:])
    except KeyboardInterrupt:
        pass
    assert len(cuda.there) == 1
    mapping.pop()
    assert not cuda.there


def test_a_refusal_is_not_asked_for_again(mapping: list[SharedMap], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Runtime(reason="out of memory")
    monkeypatch.setattr(pinned, "runtime", lambda: cuda)
    pinned.pin(mapping[0].bytes)
    pinned.pin(mapping[0].bytes[4096:])
    assert cuda.calls == ["register"]


def test_it_is_taken_back_on_the_gpu_on_which_it_was_registered(
    mapping: list[SharedMap], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread unmaps it: on another GPU, perhaps another process's, CUDA would make a context for that."""
    chosen = threading.local()
    found: list[tuple[str, int]] = []

    @contextmanager
    def device(gpu: int) -> Iterator[None]:
        chosen.gpu = gpu
        yield
        chosen.gpu = 0

    def of_this_thread() -> int:
        return int(getattr(chosen, "gpu", 0))

    def register(address: int, *_: int) -> int:
        found.append(("register", of_this_thread()))
        return 0

    def unregister(address: int) -> int:
        found.append(("unregister", of_this_thread()))
        return 0

    def other(*_: Any) -> bytes:
        return b""

    library: Any = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=unregister, cudaMemcpy2DAsync=other, cudaGetLastError=other,
        cudaGetErrorString=other,
    )  # fmt: skip
    torch = SimpleNamespace(cuda=SimpleNamespace(device=device, current_device=of_this_thread))
    monkeypatch.setattr(runtime, "torch_module", lambda: torch)
    monkeypatch.setattr(pinned, "runtime", lambda: runtime.Runtime(library))
    with device(3):
        pinned.pin(mapping[0].bytes)
    thread = threading.Thread(target=mapping.clear)
    thread.start()
    thread.join()
    assert found == [("register", 3), ("unregister", 3)]
