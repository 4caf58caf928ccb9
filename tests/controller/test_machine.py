"""Random histories against a model: a fetch returns what was stored or misses; nothing leaks; the cap holds."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.catalog import ROOT_ROW
from kvstore.controller import Session, StoreResult
from tests.controller.service import Service

paths = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


class ControllerMachine(RuleBasedStateMachine):
    """``committed`` holds every chain a commit reported; what hits must be among its prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.service = Service(chunks=6, lease_age_s_max=5.0, reservation_age_s_max=5.0, leased_bytes_max=1 << 30)
        self.sessions: list[Session] = [self.service.controller.open_session()]
        self.open: list[tuple[Session, StoreResult, tuple[int, ...]]] = []
        self.leases: list[tuple[Session, int]] = []
        self.committed: set[tuple[int, ...]] = set()

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def pick(self, data: st.DataObject) -> Session:
        return data.draw(st.sampled_from(self.sessions))

    @rule()
    def connect(self) -> None:
        if len(self.sessions) < 3:
            self.sessions.append(self.service.controller.open_session())

    @rule(data=st.data(), path=paths)
    def store(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        async def stored() -> StoreResult:
            return await self.service.store(self.pick(data), *path)

        result = self.run(stored())
        self.committed |= {path[:count] for count in range(1, result.committed_count + 1)}

    @rule(data=st.data(), path=paths)
    def reserve(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        async def reserved() -> tuple[Session, StoreResult, tuple[int, ...]]:
            session = self.pick(data)
            return session, await self.service.reserve(session, *path), path

        self.open.append(self.run(reserved()))

    def reservations_of(self, session: Session) -> list[int]:
        return [each.reservation_id for each in self.service.controller.reservations.of(session)]

    @rule(data=st.data(), whole=st.booleans())
    def finish(self, data: st.DataObject, whole: bool) -> None:
        if not self.open:
            return
        session, result, path = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if not session.is_open or result.reservation_id not in self.reservations_of(session):
            return
        controller = self.service.controller
        if not whole:
            self.run(controller.abort(session, result.reservation_id))
            return
        fills = self.service.stage(session, result, *path)
        done = self.run(controller.commit(session, result.reservation_id, fills))
        self.committed |= {path[:count] for count in range(1, done.committed_count + 1)}
        for fill in fills[:1]:
            controller.close_staging(session, fill.staging_id)

    @rule(data=st.data(), path=paths)
    def fetch(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        hits = self.service.check(self.pick(data), *path)
        assert all(path[:count] in self.committed for count in range(1, hits + 1))

    @rule(data=st.data(), path=paths)
    def lease(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        session = self.pick(data)
        result = self.service.controller.fetches.fetch(session, self.service.query(*path))
        self.leases.append((session, result.lease_id))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            session, lease_id = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            self.service.controller.release(session, [lease_id])

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if len(self.sessions) > 1:
            session = self.pick(data)
            self.sessions.remove(session)
            self.run(self.service.controller.close_session(session))

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.service.clock.advance(seconds)
        self.service.controller.reservations.expire()

    @invariant()
    def books_balance(self) -> None:
        controller, arena = self.service.controller, self.service.arena
        stats = controller.stats()
        assert arena.used_bytes <= arena.capacity_bytes
        namespaces = [each for model in controller.parts.catalog.models.values() for each in model.namespaces.values()]
        table = controller.parts.catalog.table
        rows = [row for each in namespaces for row in each.index.values()]
        ghosts = [row for each in namespaces for row in each.ghosts.values()]
        pending = sum(len(each.pending) for each in namespaces)
        assert sorted(rows + ghosts) == list(table.rows())
        assert arena.chunk_count == len(rows) + pending
        assert (
            stats.used_bytes
            == sum(controller.parts.movement.memory.placement(row).byte_count for row in rows) + stats.reserved_bytes
        )
        assert stats.lease_count == sum(len(self.service.parts.leases.of(session)) for session in self.sessions)
        for row in rows:
            children = sum(1 for other in rows if table.parents[other] == row)
            assert table.child_counts[row] == children
            assert table.parents[row] == ROOT_ROW or table.parents[row] in rows, "a child outlived its parent"

    def teardown(self) -> None:
        for session in self.sessions:
            self.run(self.service.controller.close_session(session))
        stats = self.service.controller.stats()
        assert (stats.lease_count, stats.reservation_count, stats.staging_bytes, stats.reserved_bytes) == (0, 0, 0, 0)
        self.loop.close()


TestControllerMachine = ControllerMachine.TestCase
TestControllerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
