"""Memory that torch hands out without a value holds NaN in these tests: what a kernel does not write is seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    # Only warned of: on a GPU, cuBLAS and some sums have no deterministic form, and references use them.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
