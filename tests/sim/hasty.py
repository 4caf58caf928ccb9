"""Clients that give calls up: a call is cancelled in the middle, and its client goes on, or is gone."""

from __future__ import annotations

import asyncio
import random

from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError
from tests.sim.clients import Client, OpCall
from tests.sim.knowledge import Knowledge
from tests.sim.life import DEADLINE_S, Life

GIVEN_UP = 0.35
"""The share of the calls that are given up, or would be if they did not end before."""
TURNS_MAX = 12
PATIENCE_S = (0.0002, 0.001, 0.003, 0.01, 0.03, 0.2, 2.0)
ENDS_S_MAX = 30.0
"""Simulated seconds in which a call that was cancelled ends: its jobs on the device may take their time."""


class HastyClient(Client):
    """Draws from a source of its own when it gives up which call."""

    def __init__(self, name: str, life: Life, chance: random.Random, known: Knowledge) -> None:
        super().__init__(name, life, chance, known)
        self._haste = random.Random(f"haste {life.seed} {name}")

    async def _act(self, name: str, limit_s: float, call: OpCall) -> None:
        if name == "leave" or self._haste.random() >= GIVEN_UP:
            await super()._act(name, limit_s, call)
            return
        trace = self._trace
        calling = asyncio.get_running_loop().create_task(super()._act(name, limit_s, call))
        try:
            await self._wait_for(calling)
        finally:  # also where the process has ended: then nobody waits for anything
            is_given_up = calling.cancel()
        left = (await asyncio.wait([calling], timeout=ENDS_S_MAX))[1]
        trace.check(not left or self._life.is_over, f"{name} was cancelled and goes on: {calling}")
        if not is_given_up:
            calling.result()
            return
        trace.check(calling.cancelled() or self._life.is_over, f"{name} was cancelled and ended otherwise: {calling}")
        trace.add(self.name, f"{name} -> given up")
        self._life.oracle.totals["given_up"] += 1
        if not self._life.is_over:
            await self._clean_up()

    async def _wait_for(self, calling: asyncio.Task[None]) -> None:
        """Wait until the call ends, or some turns of the loop, or some time."""
        if self._haste.random() < 0.3:
            for _ in range(self._haste.randrange(TURNS_MAX)):
                await asyncio.sleep(0)
        else:
            await asyncio.wait([calling], timeout=self._haste.choice(PATIENCE_S))

    async def _clean_up(self) -> None:
        """Give back what is known of the call; or be gone, and let the end of the session do it."""
        session, controller = self.session, self._controller
        if self._haste.random() < 0.5:
            self._leases.clear()
            self.warm.leave()
            await controller.close_session(session)
            self.session = controller.open_session()
            return
        try:
            for reservation in controller.reservations.of(session):
                await controller.abort(session, reservation.reservation_id, controller.deadline(DEADLINE_S))
            for staging_id in list(session.stagings):
                controller.close_staging(session, staging_id)
        except (DeadlineExceeded, InvalidRequest) as error:  # bytes of it still move: the session's end gives it back
            self._trace.add(self.name, f"is not rid of its store: {_said(error)}")


def _said(error: KVStoreError) -> str:
    return error.message[:40]
