"""An engine over a real sidecar."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvstore_ops.sidecar import Sidecar

from tests.engines.vllm.engine import Engine


@pytest.fixture
def engine(sidecar: Sidecar) -> Iterator[Engine]:
    made = Engine(sidecar.address)
    yield made
    made.close()
