"""What the benchmarks of the device tier stand on: room that is really there, and chains that hang together."""

from __future__ import annotations

import pytest
from kvstore_ops.bench import index, nvme

from kvstore.errors import Exhausted
from kvstore.keys import ROOT_DIGEST


def test_a_device_without_room_is_refused_before_anything_is_written() -> None:
    with pytest.raises(Exhausted, match="TMPDIR"):
        nvme.require_room(1 << 60)
    nvme.require_room(-nvme.SPARE_BYTES)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1200])
def test_chains_hang_together(count: int) -> None:
    """Every parent is a chunk before its child; a family has one root, and one end per continuation."""
    digests, parents = index.digests_of(count), index.parents_of(index.digests_of(count))
    keys = [digests[at : at + 32] for at in range(0, len(digests), 32)]
    above = [parents[at : at + 32] for at in range(0, len(parents), 32)]
    places = {key: place for place, key in enumerate(keys)}
    for place, parent in enumerate(above):
        assert parent == ROOT_DIGEST if place % index.FAMILY == 0 else places[parent] < place
    ends = [key for key in keys[: index.FAMILY] if key not in set(above)]
    assert len(ends) == (7 if count >= index.FAMILY else max(1, -(-count // index.RUN) - 1))
    assert len(places) == count
