"""Bytes between memory and the bodies of requests and answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kvstore.seams.memory import Bytes, cut, joined
from kvstore.tiers.s3.refusals import Refused

PIECE_BYTES = 256 << 10
LANDED_BYTES_MIN = 64 << 10
"""Of fewer bytes copies cost less than the change of the protocol."""


def ranges_of(target: Sequence[Bytes], range_bytes: int) -> list[list[Bytes]]:
    """Return the same memory in order, in groups of ``range_bytes``, the last one shorter."""
    total = sum(each.size for each in target)
    return list(cut(joined(target), [min(range_bytes, total - at) for at in range(0, total, range_bytes)]))


async def pour(body: Any, pieces: Sequence[Bytes], stall_s: float) -> None:
    """Copy a response's body into memory, as it comes. Its head must tell its length: a body in chunks has heads of its
    own. Raises Refused where it ends early; TimeoutError where nothing comes for ``stall_s``."""
    answer = body.raw_stream
    places = [piece.data for piece in reversed(pieces) if piece.size]
    while places:
        came = answer.content.read_nowait()
        if not came and answer.connection and _byte_count(places) >= LANDED_BYTES_MIN:
            await _land(answer, places, stall_s)
            return
        came = came or (await answer.content.readchunk())[0]
        if not came:
            raise Refused("CutShort")
        _fill(places, came)


def _byte_count(places: Sequence[memoryview]) -> int:
    return sum(place.nbytes for place in places)


def _fill(places: list[memoryview], came: bytes) -> None:
    """Copy bytes into the first of the places, which are in reverse order, and take what is full off them."""
    rest = memoryview(came)
    while rest and places:
        place = places.pop()
        count = min(place.nbytes, rest.nbytes)
        place[:count] = rest[:count]
        rest = rest[count:]
        if count < place.nbytes:
            places.append(place[count:])


async def _land(answer: Any, places: list[memoryview], stall_s: float) -> None:
    """Receive the rest of a body. Afterwards no byte of it reaches these places any more, whatever happened."""
    http, transport, stream = answer.connection.protocol, answer.connection.transport, answer.content
    is_all = answer.content_length == stream.total_bytes + _byte_count(places)
    http.pause_reading()  # this ends its timer, too
    receiver = BodyReceiver(places, transport, http.connection_lost)
    transport.set_protocol(receiver)
    transport.resume_reading()
    try:
        await receiver.ended(stall_s)
    finally:
        transport.set_protocol(http)
    if is_all:
        stream.feed_eof()  # the connection may serve again; with more to come it is closed with the body


class BodyReceiver(asyncio.BufferedProtocol):
    """Receives bytes straight into memory, in the place of aiohttp's protocol, which makes objects of them and copies
    each twice. ``places``: in reverse order; at least one. ``on_lost`` is told when the connection ends."""

    def __init__(
        self, places: list[memoryview], transport: Any, on_lost: Callable[[Exception | None], None]
    ) -> None:  # fmt: skip
        self._places = places
        self._transport = transport
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._is_whole = self._loop.create_future()

    async def ended(self, stall_s: float) -> None:
        """Wait until all places are full. Raises as ``pour``."""
        left_s = stall_s
        while not (await asyncio.wait((self._is_whole,), timeout=left_s))[0]:
            left_s = self._heard_s + stall_s - self._loop.time()
            if left_s <= 0:
                raise TimeoutError(f"nothing came for {stall_s:g} s")
        if not self._is_whole.result():
            raise Refused("CutShort")

    def get_buffer(self, _: int) -> memoryview:
        return self._places[-1]

    def buffer_updated(self, byte_count: int) -> None:
        self._heard_s = self._loop.time()
        rest = self._places.pop()[byte_count:]
        if rest:
            self._places.append(rest)
        elif not self._places:
            self._transport.pause_reading()
            self._is_whole.set_result(True)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost(error)
        if not self._is_whole.done():
            self._is_whole.set_result(False)


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
