"""Bytes between memory and the bodies of requests and answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from kvstore.seams.memory import Bytes, joined
from kvstore.tiers.s3.refusals import Refused

PIECE_BYTES = 256 << 10


def ranges_of(target: Sequence[Bytes], range_bytes: int) -> list[list[Bytes]]:
    """Return the same memory in order, in groups of ``range_bytes``, the last one shorter."""
    groups: list[list[Bytes]] = [[]]
    room = range_bytes
    for each in joined(target):
        place = 0
        while place < each.size:
            if not room:
                groups.append([])
                room = range_bytes
            piece = each[place : place + room]
            groups[-1].append(piece)
            place += piece.size
            room -= piece.size
    return groups


async def pour(body: Any, pieces: Sequence[Bytes]) -> None:
    """Copy a response's body into memory, as it comes. Raises Refused where it ends early."""
    stream = body.raw_stream.content
    rest, spare = b"", np.empty(0, np.uint8)
    for piece in pieces:
        place = 0
        while place < piece.size:
            if not spare.size:
                rest = (await stream.readchunk())[0]
                if not rest:
                    raise Refused("CutShort")
                spare = np.frombuffer(rest, np.uint8)
            count = min(spare.size, piece.size - place)
            np.copyto(piece[place : place + count], spare[:count])
            place += count
            spare = spare[count:]


class Body:
    """Memory as the body of a request: sent in pieces that are copied when their turn comes."""

    def __init__(self, runs: Sequence[Bytes]) -> None:
        self._runs = runs

    def __len__(self) -> int:
        return sum(run.size for run in self._runs)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for run in self._runs:
            for start in range(0, run.size, PIECE_BYTES):
                yield run[start : start + PIECE_BYTES].tobytes()

    def read(self, *_: object) -> bytes:
        """Never called: botocore only accepts objects with this method as a body."""
        raise NotImplementedError  # a body is iterated: a read would copy all of it at once

    def seek(self, *_: object) -> None:
        """Do nothing: each iteration begins at the first byte."""
