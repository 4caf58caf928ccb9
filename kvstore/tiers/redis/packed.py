"""Commands of many words. redis-py looks at each word of a command by itself, some 2 us a word: for a question about a
lookup's chunks that takes longer than the server's answer. Here all words are packed at once. Connections, their
retries and the reply remain redis-py's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any


def command(*words: object) -> bytes:
    """Return the bytes of one whole command, as a server reads it."""
    parts = [each if isinstance(each, bytes) else str(each).encode() for each in words]
    fronts = {size: b"$%d\r\n" % size for size in set(map(len, parts))}  # most words are keys of one length
    return b"*%d\r\n%b\r\n" % (len(parts), b"\r\n".join([fronts[len(each)] + each for each in parts]))


async def run_packed(client: Any, words: Sequence[object]) -> Any:
    """Return a command's reply, as ``client.execute_command`` does. Raises redis-py's errors, as that does."""
    pool = client.connection_pool
    connection = await pool.get_connection()
    try:
        asked = partial(_asked, connection, command(*words))
        return await connection.retry.call_with_retry(asked, lambda _: connection.disconnect())
    finally:
        await pool.release(connection)


async def _asked(connection: Any, packed: bytes) -> Any:
    await connection.send_packed_command(packed)
    return await connection.read_response()
