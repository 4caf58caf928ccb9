"""Engines that answer nobody, or oddly."""

from __future__ import annotations

import asyncio
from typing import Any

NEVER_S = 1e6


async def never(*_: Any) -> Any:
    await asyncio.sleep(NEVER_S)


async def odd(*_: Any) -> Any:
    raise OSError("nobody expects this")
