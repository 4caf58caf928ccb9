"""A service of opaque values, which can be replaced: what a key holds is a small number, repeated."""

from __future__ import annotations

from dataclasses import replace

from kvstore_client.opaque.value import Key, namespace_spec

from kvstore.chunk import Trust
from kvstore.controller import ChainQuery, Fill, ReserveRequest
from kvstore.spec import Durability, MissReason
from tests.simulated import SimulatedDisk
from tests.tiers.service import DeviceService

SPEC = replace(namespace_spec("notes"), chunk_tokens=4)
"""Small chunks, as the simulated device is small."""
SETTLE_S = 60.0


class ValueService(DeviceService):
    """Values by key, each of one chunk."""

    def __init__(
        self, *, disk: SimulatedDisk | None = None, arena_chunks: int = 32, trust: Trust | None = None
    ) -> None:  # fmt: skip
        super().__init__(arena_chunks=arena_chunks, spec=SPEC, disk=disk, trust=trust)

    def of_key(self, key: str) -> ChainQuery:
        return ChainQuery(self.model, [Key.of(key).whole])

    async def put(self, value: int, key: str = "k", *, is_settled: bool = True) -> Durability:
        """Store a value in the place of whatever the key holds. Returns the level that it reached; not ``is_settled``:
        at once. Raises KVStoreError where the service refuses it."""
        query, session = self.of_key(key), self.session
        claimed = await self.controller.reserve(session, ReserveRequest(query, query.digests, replaces=query.digests))
        staging = self.controller.create_staging(session, self.layout.body_bytes)
        staging.mapping.bytes[:] = value
        fill = Fill(0, 0, self.layout.strip_count, staging.staging_id, 0)
        await self.controller.commit(session, claimed.reservation_id, [fill])
        self.controller.close_staging(session, staging.staging_id)
        return await self.level(key) if is_settled else Durability.MEMORY

    async def level(self, key: str = "k") -> Durability:
        return (await self.controller.settle(self.of_key(key), SETTLE_S)).durability

    async def get(self, key: str = "k") -> int | None:
        """The key's value; None for a miss."""
        found = self.controller.fetches.fetch(self.session, self.of_key(key))
        lost = [each async for batch in self.controller.arrivals(found, None) for each in batch if each.lost]
        value = None if lost or not found.chunks else int(found.chunks[0].placement.pieces[1][0])
        self.controller.release(self.session, [found.lease_id])
        return value

    def row(self, key: str = "k") -> int:
        space = self.controller.parts.catalog.model(self.model).namespace(None, self.of_key(key).exactness)
        return space.index[Key.of(key).whole]

    def place_of(self, key: str = "k") -> tuple[str, int]:
        """The region file that holds a key's value, and where it begins."""
        region, slot = self.nvme.regions.find(self.device.residency(self.row(key)))
        return region.path.name, region.offset(slot)

    def evict(self, key: str = "k") -> None:
        """As the policies do for want of room."""
        row = self.row(key)
        for copies in (self.device, self.mapped):
            if row in copies:
                self.controller.parts.movement.removal.drop(copies, row, MissReason.EVICTED)
