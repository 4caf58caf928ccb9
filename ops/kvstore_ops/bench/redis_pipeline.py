"""The bare pipeline beside ``redis``: two processes read fields into memory that this process shares and hash them, as
the sidecar's movers do, and this process hears of each field. Nothing else: no service, no plan, no lease, no message
for an engine. It shows what is left of a bare client's rate when the bytes are checked, in processes of their own.

    python -m kvstore_ops.bench.redis_pipeline SOCKET DESCRIPTOR BYTES    such a process
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

IN_FLIGHT = 2
READERS = 2
"""The default of tiers.redis.reader_count."""
STRIP_BYTES = 64 << 10
"""A strip of the measured geometry: 256 tokens of one KV head, K or V."""
WAIT_S_MAX = 60.0
END_S_MAX = 5.0
PAD_BYTES = 1 << 20
"""Room for the protocol's bytes around the fields."""
Field = tuple[bytes, bytes, int]
"""A key, a field's name, and the number of its bytes."""


def read_fields(
    line: socket.socket, memory: Any, fields: Sequence[Field], landed: Callable[[int, int], None] | None = None
) -> None:
    """Read the fields in order into ``memory``, each with the protocol's bytes around it, IN_FLIGHT at a time.
    ``landed`` gets the start and the stop of each."""
    place = 0
    for number, (_, _, size) in enumerate(fields):
        for key, name, _ in fields[:IN_FLIGHT] if number == 0 else fields[number + 1 : number + IN_FLIGHT]:
            line.sendall(b"*3\r\n$4\r\nHGET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(name), name))
        start, stop = place, place + len(b"$%d\r\n" % size) + size + 2
        while place < stop:
            place += line.recv_into(memory[place:stop], 0, socket.MSG_WAITALL)
        if landed is not None:
            landed(start, stop)


class Pipeline:
    """Readers of the server at ``path``, which have connected. ``byte_count``: the most bytes of one read."""

    def __init__(self, path: str, byte_count: int) -> None:
        self._descriptor = os.memfd_create("bench")
        size = byte_count + PAD_BYTES
        os.ftruncate(self._descriptor, READERS * size)
        command = [sys.executable, "-m", __spec__.name, path, str(self._descriptor), str(size)]
        self._readers = [
            subprocess.Popen(
                [*command, str(number * size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                pass_fds=[self._descriptor],
            )
            for number in range(READERS)
        ]  # fmt: skip
        self._hear(dict.fromkeys(self._readers, 1))

    def give(self, fields: Sequence[Field]) -> None:
        """Name the fields of the next ``read``: each reader gets every other chunk."""
        keys = list(dict.fromkeys(key for key, _, _ in fields))
        self._parts = [[each for each in fields if each[0] in keys[number::READERS]] for number in range(READERS)]
        for reader, part in zip(self._readers, self._parts, strict=True):
            self._say(reader, json.dumps([(key.hex(), name.hex(), size) for key, name, size in part]))
        self._hear(dict.fromkeys(self._readers, 1))

    def read(self) -> None:
        """Have all fields read, and return when each was hashed."""
        for reader in self._readers:
            self._say(reader, "")
        self._hear({reader: len(part) for reader, part in zip(self._readers, self._parts, strict=True)})

    def close(self) -> None:
        """End the readers."""
        for reader in self._readers:
            for end in (reader.stdin, reader.stdout):
                assert end is not None
                end.close()
            try:
                reader.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                reader.kill()
                reader.wait()
        os.close(self._descriptor)

    def _say(self, reader: subprocess.Popen[bytes], what: str) -> None:
        assert reader.stdin is not None
        reader.stdin.write(what.encode() + b"\n")
        reader.stdin.flush()

    def _hear(self, counts: dict[subprocess.Popen[bytes], int]) -> None:
        """Wait for so many bytes of each reader."""
        left = {_output(reader): count for reader, count in counts.items() if count}
        while left:
            ready, _, _ = select.select(list(left), [], [], WAIT_S_MAX)
            assert ready, "a reader of the benchmark does not answer"
            for each in ready:
                data = os.read(each, left[each])
                assert data, "a reader of the benchmark ended"
                left[each] -= len(data)
                if not left[each]:
                    del left[each]


def _output(reader: subprocess.Popen[bytes]) -> int:
    assert reader.stdout is not None
    return reader.stdout.fileno()


def main(path: str, descriptor: int, size: int, start: int) -> None:
    """Read what standard input names, once for each empty line, and write a byte for each field."""
    memory = memoryview(mmap.mmap(descriptor, 0))[start : start + size]
    np.frombuffer(memory, np.uint8)[:] = 1  # every page is there before anything is measured
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)

        def landed(first: int, stop: int) -> None:
            for at in range(first, stop, STRIP_BYTES):
                xxhash.xxh3_128_digest(memory[at : min(at + STRIP_BYTES, stop)])
            os.write(1, b".")

        os.write(1, b".")
        fields: list[Field] = []
        for text in sys.stdin:
            if text.strip():
                fields = [(bytes.fromhex(key), bytes.fromhex(name), count) for key, name, count in json.loads(text)]
                os.write(1, b".")
            else:
                read_fields(line, memory, fields, landed)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
