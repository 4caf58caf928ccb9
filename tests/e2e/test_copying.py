"""The client's copy threads."""

from __future__ import annotations

import torch
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
