"""A machine gets byte movers by its processors."""

from __future__ import annotations

import pytest

from kvstore.server.app import mover_count


@pytest.mark.parametrize(("processors", "movers"), [(1, 2), (2, 2), (8, 2), (12, 3), (16, 4), (32, 8), (192, 8)])
def test_a_quarter_of_the_processors(processors: int, movers: int) -> None:
    assert mover_count(processors) == movers
