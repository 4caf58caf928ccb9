"""A catalog with two tiers of which only the places matter: memory, and a device below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog import NOWHERE, Catalog, Copies
from kvstore.policy import LeastRecentlyUsed
from kvstore.seams import Memory
from kvstore.spec import Durability, MissReason, Tier
from kvstore.tiers import LocalTier, Residency
from tests.simulated import BytearrayMemory


class Shelf:
    """A tier that keeps no bytes. A residency's top byte is the encoding."""

    durability = Durability.LOCAL

    def __init__(self, name: str, kind: Tier) -> None:
        self.name = name
        self.kind = kind
        self.removed: list[Residency] = []

    def encodings(self, residencies: NDArray[np.int64]) -> NDArray[np.uint8]:
        return (residencies >> 56).astype(np.uint8)

    def remove(self, residencies: Sequence[Residency], *, erase: bool = False) -> None:
        self.removed += residencies

    async def quarantine(self, residency: Residency) -> None:
        self.removed.append(residency)


def shelved_catalog(memory: Memory | None = None, namespace_count_max: int = 1 << 14) -> Catalog:
    """Its table's tiers are memory and the device, in that order."""
    catalog = Catalog(4, memory or BytearrayMemory(), namespace_count_max)
    for name, kind in (("dram", Tier.DRAM), ("nvme", Tier.NVME)):
        catalog.table.add_tier(Copies(cast(LocalTier, Shelf(name, kind)), LeastRecentlyUsed()))
    return catalog


def put(catalog: Catalog, row: int, residency: Residency) -> None:
    """The device has a chunk now, or (NOWHERE) no more."""
    device = catalog.table.copies[1]
    if residency == NOWHERE:
        device.take(row, MissReason.EVICTED)
    else:
        device.put(row, residency)
