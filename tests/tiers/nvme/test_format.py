"""Format 1, for ever: a directory written by the release that brought it is committed beside this file, and every later
release opens it and serves its chunks to the bit.

    python -m tests.tiers.nvme.test_format <directory>

wrote it once. It is never written again: a format that changes gets a directory of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from kvstore.controller import FetchResult
from kvstore.keys import fingerprint
from kvstore.spec import Encoding, LayerSpec, MissReason, ModelSpec, RopeSpec
from kvstore.tiers.nvme import recovery
from tests.simulated import SimulatedDisk, simulate
from tests.tiers.service import HOME, KIB, DeviceService

FIXTURE = Path(__file__).parent / "fixtures" / "format-1"
SPEC = ModelSpec(
    model_id="format-1", weights_digest="01" * 32, layers=(LayerSpec(kv_heads=2, k_dim=8, v_dim=8),) * 2,
    hidden_size=32, vocab_size=1000, cache_dtype="bfloat16", rope=RopeSpec(rotary_dim=8), chunk_tokens=16,
)  # fmt: skip
RAW, LZ4 = (1, 2), (1, 3)
"""A chain of two raw chunks, and another child of the first, encoded. The fourth slot is free."""


class FormatService(DeviceService):
    """Bytes that follow from BLAKE3 alone, half of each strip compressible."""

    def body(self, digest: bytes) -> np.ndarray:
        body = np.zeros(self.layout.body_bytes, np.uint8)
        noise = np.frombuffer(blake3(digest).digest(self.layout.body_bytes), np.uint8)
        for offset, length in zip(self.layout.strip_offsets.tolist(), self.layout.strip_lengths.tolist(), strict=True):
            body[offset : offset + length : 2] = noise[offset : offset + length : 2]
        return body


def whole_chunks(result: FetchResult) -> list[str]:
    """BLAKE3 of each chunk as memory has it: header and slabs."""
    return [blake3(b"".join(piece.tobytes() for piece in each.placement.pieces)).hexdigest() for each in result.chunks]


def write_fixture(directory: Path) -> None:
    """How the fixture was made."""
    disk = SimulatedDisk(1)

    async def written() -> None:
        for encoding, path in ((Encoding.RAW, RAW), (Encoding.LZ4, LZ4)):
            service = FormatService(disk=disk, encoding=encoding, capacity_bytes=53 * KIB, spec=SPEC)
            await service.start()
            await service.keep(*path)
            await service.fetch(*path)
            print(path, whole_chunks(service.controller.fetches.fetch(service.session, service.query(*path))))
            await service.stop()

    simulate(written(), seed=1)
    directory.mkdir(parents=True, exist_ok=True)
    for name in disk.names(HOME):
        if name != "lock":
            (directory / name).write_bytes(disk.read_file(HOME / name))


FINGERPRINT = "4b227199cfd7cb245827a5063ccb97da01fbe403adeeb55547ed017c5a4ab92b"
_ROOT = "8ac3b32da2c3382e223a4fb5d95f28e2005c6f3b6616d160ae5de722c3a78cb3"
CHUNKS = {
    RAW: [_ROOT, "a88dbe79f9cd70038b7ad7d68afa1828d2f24e488c018f2569f4cb1c67faa975"],
    LZ4: [_ROOT, "33e35ee48a64ef4a075e76141cfaae53c4fd77321acb787833eb5824e5116ec4"],
}


def opened(*, without: str = "") -> FormatService:
    disk = SimulatedDisk(1)
    for file in FIXTURE.iterdir():
        if file.name != without:
            disk.write_file(HOME / file.name, file.read_bytes())
    return FormatService(disk=disk, spec=SPEC)


def test_the_fixture_is_what_was_committed() -> None:
    sizes = {file.name: file.stat().st_size for file in FIXTURE.iterdir()}
    assert set(sizes) == {"format", "index", "region-00000-12288.kvs"}
    assert sizes["region-00000-12288.kvs"] == 4096 + 4 * 12288
    assert fingerprint(SPEC, SPEC.kind).hex() == FINGERPRINT


@pytest.mark.parametrize("without", ["", "index", "format"])
def test_format_1_is_served_to_the_bit(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its snapshot, by its headers, and where nothing but the regions is left."""
    service = opened(without=without)
    scans: list[None] = []
    scan = recovery.scan
    monkeypatch.setattr(recovery, "scan", lambda *arguments: scans.append(None) or scan(*arguments))

    async def scenario() -> None:
        assert len(scans) == bool(without)
        assert service.counters()["nvme_recovered_chunks"] == 3
        for path in (RAW, LZ4):
            assert await service.fetch(*path) == (2, MissReason.NONE)
            assert whole_chunks(service.controller.fetches.fetch(service.session, service.query(*path))) == CHUNKS[path]
        assert service.nvme.statistics().chunk_count == 3
        await service.keep(1, 2, 4)
        await service.restart()
        assert await service.fetch(1, 2, 4) == (3, MissReason.NONE)

    service.run(scenario)


if __name__ == "__main__":
    write_fixture(Path(sys.argv[1]))
