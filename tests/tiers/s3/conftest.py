"""A bucket of a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contracts.shared.s3_stand import S3Stand


@pytest.fixture
def stand(tmp_path: Any) -> Iterator[S3Stand]:
    made = S3Stand(tmp_path)
    yield made
    made.switches.close()
