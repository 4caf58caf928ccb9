"""Tests of pages and of a pool once more, whose parts all go in one launch: the kernel is interpreted on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Client, Paged, connect
from kvstore_client.cuda import launches
from kvstore_client.cuda.launches import ARRIVE
from kvstore_client.planes.shared_memory import landing
from kvstore_kernels.gpu.strips import TableLaunch
from kvstore_ops.sidecar import Sidecar

from tests.e2e.test_gpu_by_cpu import (
    client,
    crossed,
    test_chunks_of_whole_pages_are_written_together,
    test_chunks_that_lie_here_and_there_cross_together,
    test_heads_layers_and_streams,
    test_into_the_callers_tensors,
    test_tokens_that_are_not_wanted_before_the_first_slot,
)
from tests.e2e.test_paged import COUNT, LAYOUTS, SPEC, engine_pages
from tests.kernels.device import triton_here
from tests.specs import bits, random_cache, tokens_of

AGAIN = (
    client,
    crossed,
    test_chunks_of_whole_pages_are_written_together,
    test_chunks_that_lie_here_and_there_cross_together,
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
    """The other tests of this file rest on it."""
    test_into_the_callers_tensors(client)
    assert set(launched) == ({ARRIVE} if plane == "local" else set())


def test_layers_in_turn_are_launched_one_by_one(plane: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "JOB_BYTES", 1)
    tokens, kv = tokens_of(COUNT), random_cache(SPEC, COUNT)
    client.store(SPEC, tokens, kv).wait()
    into = [tuple(torch.zeros(2, COUNT, 8, dtype=torch.bfloat16) for _ in "KV") for _ in kv]
    for layer, planes in client.fetch_layers(SPEC, tokens, into=into):
        assert all((bits(plane) == kept).all() for plane, kept in zip(planes, kv[layer], strict=True))


@pytest.mark.parametrize("form", ["planes", "pages"])
def test_a_graph_that_needs_a_tensor_learns_of_a_launch(local_sidecar: Sidecar, launched: list[str], form: str) -> None:
    tokens = tokens_of(COUNT)
    shape = (2, COUNT, 8)
    planes = [tuple(torch.zeros(shape, dtype=torch.bfloat16) for _ in "KV") for _ in range(2)]
    pages = engine_pages(LAYOUTS[0], 9, 16, 2, 8, pairs=False, tensor=True)
    needed, into = (planes[1][1], planes) if form == "planes" else (pages[1], Paged(pages, np.arange(COUNT)))
    x = torch.ones(needed.shape, dtype=torch.bfloat16, requires_grad=True)
    graph = (x * needed).sum()
    with connect(local_sidecar.address) as client:
        client.store(SPEC, tokens, random_cache(SPEC, COUNT)).wait()
        assert client.fetch(SPEC, tokens, into=into).token_count == COUNT
    assert launched
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()
