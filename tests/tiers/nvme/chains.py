"""Ten chains on the device, and what of them is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvstore.spec import MissReason
from tests.simulated import SimulatedDisk
from tests.tiers.service import DeviceService

PATHS = [(number, 50 + number) for number in range(10)]
"""Ten chains of two chunks each."""

STARTS = ["snapshot", "scan"]


async def stored(service: DeviceService) -> None:
    for path in PATHS:
        await service.keep(*path)


async def served(service: DeviceService) -> dict[tuple[int, ...], tuple[int, MissReason]]:
    """Chains that do not come back whole: how far they do, and why no further."""
    outcomes = {path: await service.fetch(*path) for path in PATHS}
    return {path: outcome for path, outcome in outcomes.items() if outcome[0] < len(path)}


async def storable(service: DeviceService) -> None:
    """Every chain can be stored again at once, and is whole then, also from the device."""
    for path in PATHS:
        await service.keep(*path)
    service.forget_memory()
    assert await served(service) == {}
    service.balance()


def damaged(service: DeviceService, how: Callable[[SimulatedDisk, list[Path]], None]) -> Callable[[], None]:
    return lambda: how(service.disk, service.region_files())
