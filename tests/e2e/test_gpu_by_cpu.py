"""The client's copies of a GPU's tensors, made by the CPU in a GPU's place: tests of other files once more, in which
every tensor is taken for a GPU's. What only a GPU has (streams, registered memory, a copy engine) is in tests/gpu."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Event

import numpy as np
import pytest
import torch
from kvstore_client import Paged, connect
from kvstore_client.copying import COPY_THREADS
from kvstore_client.cuda import lanes, mirror
from kvstore_client.fetch.open import open_resident
from kvstore_client.fetch.target import given_places
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.shared_memory import landing
from kvstore_client.prompt import Prompt
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Internal, KVStoreError
from kvstore.seams import FaultPoints
from kvstore.seams.jobs import NotBegun
from kvstore.spec import Exactness
from tests.e2e.test_paged import (
    COUNT,
    LAYOUTS,
    SPEC,
    client,
    engine_pages,
    slots_in,
    test_a_chunk_that_fails_its_checksums_is_not_written,
    test_a_store_from_pages_of_a_latent_cache,
    test_a_store_takes_every_token_from_its_slot,
    test_chunks_of_whole_pages_are_written_together,
    test_every_token_lands_in_its_slot_and_nothing_else,
    test_heads_layers_and_streams,
    test_mla_pages,
    test_tokens_that_are_not_wanted_before_the_first_slot,
)
from tests.e2e.test_round_trip import test_into_the_callers_tensors
from tests.specs import bits, random_cache, tokens_of

AGAIN = (
    client,
    test_a_chunk_that_fails_its_checksums_is_not_written,
    test_a_store_from_pages_of_a_latent_cache,
    test_a_store_takes_every_token_from_its_slot,
    test_chunks_of_whole_pages_are_written_together,
    test_every_token_lands_in_its_slot_and_nothing_else,
    test_heads_layers_and_streams,
    test_into_the_callers_tensors,
    test_mla_pages,
    test_tokens_that_are_not_wanted_before_the_first_slot,
)
"""Imported to be run here, too."""


@pytest.fixture(autouse=True)
def crossed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take every tensor for a GPU's, and list the directions in which bytes cross."""
    directions: list[int] = []
    plain = mirror.Mirror._copy

    def copy(self: mirror.Mirror, direction: int) -> None:
        directions.append(direction)
        plain(self, direction)

    monkeypatch.setattr(mirror.Mirror, "_copy", copy)
    monkeypatch.setattr(lanes, "gpu_of", lambda plane: plane.device if isinstance(plane, torch.Tensor) else None)
    monkeypatch.setattr("kvstore_client.fetch.given._alike", lambda *_: None)
    return directions


def test_the_cpu_stands_in_both_ways(plane: str, client: object, crossed: list[int]) -> None:
    """The other tests of this file rest on it."""
    test_into_the_callers_tensors(client)
    assert (mirror.TO_DEVICE in crossed) == (plane == "local"), "the remote plane's messages go to the tensors at once"


@pytest.mark.parametrize("at", [0, 1])
def test_layers_in_turn_of_which_a_copy_fails_are_not_shown(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The job's error is the error of each layer that had not come, and nothing of it runs on."""
    tokens, kv = tokens_of(COUNT), random_cache(SPEC, COUNT)
    monkeypatch.setattr(landing, "JOB_BYTES", 1)  # a range per layer
    loads = iter(range(99))
    plain = mirror.Mirror.load

    def load(self: mirror.Mirror) -> None:
        if next(loads) == at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        plain(self)

    with connect(local_sidecar.address) as client:
        client.store(SPEC, tokens, kv).wait()
        monkeypatch.setattr(mirror.Mirror, "load", load)
        into = engine_pages(LAYOUTS[0], 9, 16, 2, 8, pairs=False, tensor=True)
        match = client.lookup(SPEC, tokens, hold=True)
        transfer = client.start_fetch(match.ticket, into=Paged(into, np.arange(COUNT), LAYOUTS[0]))
        with pytest.raises(Internal, match="illegal memory access"):
            transfer.wait(10)
        assert transfer.poll() <= at
        assert client.fetch(SPEC, tokens).token_count == COUNT, "the chunks are as good as before"


def test_a_job_that_no_thread_takes_is_the_error_of_every_layer(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(COUNT)
    with connect(local_sidecar.address) as client:
        client.store(SPEC, tokens, random_cache(SPEC, COUNT)).wait()
        match = client.lookup(SPEC, tokens, hold=True)
        monkeypatch.setattr("kvstore_client.copying.begun", refused)
        into = engine_pages(LAYOUTS[0], 9, 16, 2, 8, pairs=False, tensor=True)
        transfer = client.start_fetch(match.ticket, into=Paged(into, np.arange(COUNT), LAYOUTS[0]))
        with pytest.raises(KVStoreError):
            transfer.wait(10)
        assert transfer.poll() == 0


def refused(*_: object) -> Future[None]:
    """A job that never began."""
    job: Future[None] = Future()
    job.set_exception(NotBegun("no thread is to be had"))
    return job


class Interrupted:
    """A stream of which the first wait is interrupted."""

    def __init__(self) -> None:
        self.waits = 0
        self.is_settled = False

    def synchronize(self) -> None:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt
        self.is_settled = True


def test_an_interrupt_comes_after_the_last_copy() -> None:
    streams = [Interrupted(), Interrupted()]
    with pytest.raises(KeyboardInterrupt):
        lanes._settle(streams)
    assert all(stream.is_settled for stream in streams)


@pytest.mark.parametrize("gap", [(), (1,), (2, 3)], ids=str)
def test_chunks_that_lie_here_and_there_cross_together(
    local_sidecar: Sidecar, crossed: list[int], gap: tuple[int, ...]
) -> None:
    """Runs of several distances, and chunks of which no token has a slot between them."""
    tokens, kv = tokens_of(COUNT, 5), random_cache(SPEC, COUNT, 5)
    with connect(local_sidecar.address) as client:
        for step, (stop, others) in enumerate([(16, 1), (32, 2), (64, 1), (80, 3), (COUNT, 0)]):
            client.store(SPEC, tokens[:stop], [(k[:, :stop], v[:, :stop]) for k, v in kv]).wait()
            for other in range(others):
                seed = 100 + 10 * step + other
                client.store(SPEC, tokens_of(16, seed), random_cache(SPEC, 16, seed)).wait()
        crossed.clear()
        dense = [tuple(torch.zeros(2, COUNT, 8, dtype=torch.bfloat16) for _ in "KV") for _ in kv]
        assert client.fetch(SPEC, tokens, into=dense).token_count == COUNT
        for both, each in zip(dense, kv, strict=True):
            assert all((bits(plane) == kept).all() for plane, kept in zip(both, each, strict=True))
        assert 0 < len(crossed) <= 2, "whole chunks together, and the tail"
        slots = slots_in(COUNT, 6, 16)
        for chunk in gap:
            slots[16 * chunk : 16 * chunk + 16] = -1
        there = slots >= 0
        pages = engine_pages(LAYOUTS[0], 6, 16, 2, 8, pairs=False, tensor=True)
        assert client.fetch(SPEC, tokens, into=Paged(pages, slots, LAYOUTS[0])).token_count == COUNT
        for layer, each in zip(pages, kv, strict=True):
            flat = bits(layer).reshape(2, 96, 2, 8)
            for half, kept in zip(flat, each, strict=True):
                assert (half[slots[there]].swapaxes(0, 1) == kept[:, there]).all()
                assert (np.delete(half, slots[there], axis=0) == 0xDBDB).all()


@pytest.mark.parametrize("form", ["planes", "pages"])
def test_a_chunk_beyond_its_destination_is_not_copied(local_sidecar: Sidecar, form: str) -> None:
    """As a confused sidecar may name one: a kernel would write on, into what lies behind."""
    tokens, short = tokens_of(COUNT), SPEC.chunk_tokens
    whole = [torch.zeros(2, COUNT, 8, dtype=torch.bfloat16) for _ in range(4)]
    pages = engine_pages(LAYOUTS[0], 9, 16, 2, 8, pairs=False, tensor=True)
    into = [(whole[0][:, :short], whole[1][:, :short]), (whole[2][:, :short], whole[3][:, :short])]
    wanted = Wanted.of(SPEC, None, None, (), False)
    with connect(local_sidecar.address) as client:
        client.store(SPEC, tokens, random_cache(SPEC, COUNT)).wait()
        prefix = open_resident(client._context, wanted, Prompt.of(SPEC, tokens, (), Exactness.EXACT))
        given = given_places(wanted, into if form == "planes" else Paged(pages, np.arange(short + 1), LAYOUTS[0]))
        fused = given(short).fused(prefix.runs(0))
        with pytest.raises(Internal, match="ends at token"):
            for piece in fused.pieces(FaultPoints(), 1):
                piece()
        prefix.close()
    assert not any(plane.any() for plane in whole)


def test_layers_in_turn_that_have_not_begun_are_stopped_at_once(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, crossed: list[int]
) -> None:
    tokens, go = tokens_of(COUNT), Event()
    into = engine_pages(LAYOUTS[0], 9, 16, 2, 8, pairs=False, tensor=True)
    with connect(local_sidecar.address) as client:
        client.store(SPEC, tokens, random_cache(SPEC, COUNT)).wait()
        before = len(crossed)
        busy = [client._context.copier.submit(go.wait, 10.0) for _ in range(COPY_THREADS)]
        layers = iter(client.fetch_layers(SPEC, tokens, into=Paged(into, np.arange(COUNT), LAYOUTS[0])))
        monkeypatch.setattr("kvstore_client.fetch.stream.wait_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(layers)
        assert not any(each.done() for each in busy), "it waited for nobody"
        go.set()
        assert client.fetch(SPEC, tokens).token_count == COUNT
        assert len(crossed) == before


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
