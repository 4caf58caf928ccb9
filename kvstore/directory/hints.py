"""Hints which prefixes of a model are fetched most, as one node gives them to nodes that begin: runs of chunks.

    per run   the run in front of it u16 (its number + 1; 0: none), chunk count u16, the digests of its chunks

A run's chain is that of the run in front of it and then its own chunks. A hint that is wrong costs a miss.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from kvstore.errors import DataLoss
from kvstore.keys import DIGEST_BYTES

HINT_BYTES_MAX = 64 << 10
"""Bytes of one node's hints for one model: some 2,000 chunks."""
CHAIN_COUNT_MAX = 4096
"""Chunks of the longest chain that hints may name."""
_RUN = struct.Struct("<HH")
HotRun = tuple[int, Sequence[bytes]]
"""The index of the run in front in the same list, -1 where there is none, and the digests of the run."""


def pack_hints(runs: Iterable[HotRun]) -> bytes:
    """Return the leading runs for which there is room."""
    data = bytearray()
    for above, digests in runs:
        more = _RUN.pack(above + 1, len(digests)) + b"".join(digests)
        if len(data) + len(more) > HINT_BYTES_MAX:
            break
        data += more
    return bytes(data)


def unpack_hints(data: bytes) -> list[list[bytes]]:
    """Return the chains, in the order of their runs. Raises DataLoss for anything else."""
    chains: list[list[bytes]] = []
    at = 0
    while at < len(data):
        if len(data) > HINT_BYTES_MAX or at + _RUN.size > len(data):
            raise DataLoss("hints of another node are too long, or end early")
        above, count = _RUN.unpack_from(data, at)
        start, at = at + _RUN.size, at + _RUN.size + count * DIGEST_BYTES
        front = chains[above - 1] if 0 < above <= len(chains) else []
        if above > len(chains) or not count or at > len(data) or len(front) + count > CHAIN_COUNT_MAX:
            raise DataLoss("hints of another node are malformed")
        chains.append([*front, *(data[each : each + DIGEST_BYTES] for each in range(start, at, DIGEST_BYTES))])
    return chains
