"""Tests of pages and of a pool once more, whose parts all go in one launch: the kernel is interpreted on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kvstore_client.cuda import launches
from kvstore_client.cuda.launches import ARRIVE
from kvstore_kernels.gpu.strips import TableLaunch

from tests.e2e.test_gpu_by_cpu import (
    client,
    crossed,
    test_chunks_of_whole_pages_are_written_together,
    test_heads_layers_and_streams,
    test_into_the_callers_tensors,
    test_tokens_that_are_not_wanted_before_the_first_slot,
)
from tests.kernels.device import triton_here

AGAIN = (
    client,
    crossed,
    test_chunks_of_whole_pages_are_written_together,
    test_heads_layers_and_streams,
    test_into_the_callers_tensors,
    test_tokens_that_are_not_wanted_before_the_first_slot,
)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Have launches made by the interpreter, and list their programs."""
    programs: list[str] = []

    plain = TableLaunch.run

    def run(self: TableLaunch, *arguments: Any) -> bool:
        programs.append(self.program)
        return plain(self, *arguments)

    monkeypatch.setattr(launches, "can_launch", lambda _: True)
    monkeypatch.setattr(TableLaunch, "run", run)
    with triton_here():
        yield programs


def test_all_parts_go_in_one_launch(plane: str, client: object, launched: list[str]) -> None:
    """What the other tests of this file rest on."""
    test_into_the_callers_tensors(client)
    assert set(launched) == ({ARRIVE} if plane == "local" else set())
