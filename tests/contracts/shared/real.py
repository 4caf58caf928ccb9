"""How a scenario of a real engine's stand runs: on a loop of its own, by the machine's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvstore.tiers import SharedTier
from tests.fakes.proxy import Proxy
from tests.fakes.s3_proxy import S3Proxy


class RealStand(Protocol):
    tier: SharedTier
    other: SharedTier


def run_real(stand: RealStand, scenario: Callable[[], Awaitable[None]], line: Proxy | S3Proxy) -> None:
    """Run it, then close its nodes, one of them twice, and the line."""

    async def whole() -> None:
        try:
            await scenario()
        finally:
            for each in (stand.tier, stand.other, stand.tier):
                await each.close()

    try:
        asyncio.run(whole())
    finally:
        line.close()
