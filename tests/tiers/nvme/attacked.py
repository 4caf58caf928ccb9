"""A device that somebody else writes to, too."""

from __future__ import annotations

import numpy as np

from kvstore.seams import EnvelopeKey
from kvstore.seams.memory import Bytes
from kvstore.spec import Encoding
from kvstore.tiers.nvme import NvmeTier
from tests.contracts.chunks import SMALL, Chunk, write
from tests.contracts.local.stands import NvmeStand
from tests.tiers.attacks import outcome_of, trust
from tests.tiers.service import HOME

KINDS = ("mac", "aead")

PATH = (3, 53)

RECORD = HOME.parent / "plain" / HOME.name


class Device(NvmeStand):
    """A tier and its attacker's hands. ``places`` are the residencies of chunks by storage key."""

    def __init__(self, kind: str, *keys: EnvelopeKey, encoding: Encoding = Encoding.RAW) -> None:
        self.trust, self.encoding, self.places = trust(kind, *keys), encoding, dict[bytes, int]()
        super().__init__()

    def build(self) -> NvmeTier:
        self.nvme = super().build()
        return self.nvme

    async def put(self, what: Chunk) -> Chunk:
        self.places[what.header.storage_key] = await write(self.nvme, what)
        return what

    async def read(self, what: Chunk) -> str:
        residency = self.places.get(what.header.storage_key)
        return (
            "absent"
            if residency is None
            else await outcome_of(what, lambda each, _: self.nvme.open(each.name, residency))
        )

    async def found_again(self, *, kill: bool = True) -> None:
        """After a restart: what it brings back."""
        await self.restart(kill=kill)
        self.places = self.found()

    def copy_of(self, residency: int, byte_count: int = SMALL.total_bytes) -> Bytes:
        path, offset = self.place(residency, 0)
        return np.frombuffer(bytearray(self.disk.read_file(path)[offset : offset + byte_count]), np.uint8)

    def lay(self, residency: int, copy: Bytes) -> None:
        path, offset = self.place(residency, 0)
        whole = bytearray(self.disk.read_file(path))
        whole[offset : offset + copy.size] = copy.tobytes()
        self.disk.write_file(path, bytes(whole))


def key(what: Chunk) -> bytes:
    return what.header.storage_key
