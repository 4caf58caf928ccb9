"""The client's copy threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvstore_client import copying
from kvstore_client.copying import Copier


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


@pytest.mark.parametrize("shape", [(0, 3), (1, 7), (5, 3), (7, 2, 3), (64,)])
@pytest.mark.parametrize("piece_bytes", [1, 24, 100, 1 << 20])
def test_a_copy_in_pieces_is_the_whole_copy(
    shape: tuple[int, ...], piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", piece_bytes)
    source = np.random.default_rng(1).integers(0, 1 << 15, (2, *shape), np.int16)[1]
    target = np.zeros((*shape, 2), np.int16)
    copying.copy(target[..., 1], source)
    assert np.array_equal(target[..., 1], source)
    assert not target[..., 0].any()
    tensor = torch.zeros(*shape, 2, dtype=torch.int16)
    copying.copy(tensor[..., 0], torch.from_numpy(source))
    assert np.array_equal(tensor[..., 0].numpy(), source)
    assert not tensor[..., 1].any()


def test_a_long_copy_gives_way_after_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[None] = []
    monkeypatch.setattr(copying, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(copying, "give_way", lambda: pieces.append(None))
    copying.copy(np.zeros((8, 512), np.int8), np.ones((8, 512), np.int8))
    assert len(pieces) == 4
