"""Memory that CUDA was given: it is taken back before others may get its addresses. A stand-in for CUDA's runtime."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from kvstore_client.cuda import pinned

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

    def unregister(self, address: int) -> None:
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
