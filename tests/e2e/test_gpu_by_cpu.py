"""The client's copies of a GPU's tensors, made by the CPU in a GPU's place: tests of other files once more, in which
every tensor is taken for a GPU's. What only a GPU has (streams, registered memory, a copy engine) is in tests/gpu."""

from __future__ import annotations

import pytest
import torch
from kvstore_client.cuda import lanes, mirror

from tests.e2e.test_paged import (
    client,
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
    """What the other tests of this file rest on."""
    test_into_the_callers_tensors(client)
    assert (mirror.TO_DEVICE in crossed) == (plane == "local"), "the remote plane's messages go to the tensors at once"
