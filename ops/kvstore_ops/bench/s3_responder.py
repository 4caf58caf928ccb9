"""A minimal server of S3's GET, HEAD, PUT, DELETE and uploads in parts, from memory, on loopback. It is for benchmarks
of clients, so it must be faster than they are. It checks no signatures and ignores conditions. No test of the product
relies on it.

    python -m kvstore_ops.bench.s3_responder [SECONDS]

It prints its port, and ends with its standard input. A pause delays each answer to a GET by SECONDS, as the distance to
a real bucket would.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import parse_qs

HEAD_BYTES_MAX = 1 << 16


class Responder:
    """The server. It has a thread per connection; bodies are sent by one system call each."""

    def __init__(self, first_byte_s: float = 0.0) -> None:
        self._first_byte_s = first_byte_s
        self._objects: dict[str, bytearray] = {}
        self._parts: dict[str, dict[int, bytearray]] = {}
        """The parts of each path whose upload has not ended; the path is its upload's name, too."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Serve until the process ends."""
        while True:
            connection = self._listener.accept()[0]
            threading.Thread(target=self._answer_all, args=(connection,), daemon=True).start()

    def _answer_all(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, suppress(ConnectionError):
            rest = b""
            while True:
                while b"\r\n\r\n" not in rest:
                    more = connection.recv(HEAD_BYTES_MAX)
                    if not more:
                        return
                    rest += more
                head, _, rest = rest.partition(b"\r\n\r\n")
                rest = self._answer(connection, head.decode("latin-1"), rest)

    def _answer(self, connection: socket.socket, head: str, rest: bytes) -> bytes:
        """Answer one request. ``rest``: bytes that were read behind its head. Return the bytes of the next request."""
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        path, _, query = path.partition("?")
        if "expect" in headers:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if method == "PUT":
            data, rest = _body(connection, headers, rest)
            part = parse_qs(query).get("partNumber")
            if part:
                self._parts[path][int(part[0])] = data
            else:
                self._objects[path] = data
            self._say(connection, "200 OK", 0, b"", f'ETag: "{len(data)}"\r\n')
            return rest
        if method == "POST":
            return self._upload_step(connection, path, query, headers, rest)
        if method == "DELETE":
            self._objects.pop(path, None)
            self._say(connection, "204 No Content", 0, b"")
            return rest
        if method == "GET" and self._first_byte_s:
            time.sleep(self._first_byte_s)
        found = self._objects.get(path)
        if found is None:
            body = b"<Error><Code>NoSuchKey</Code></Error>"
            self._say(connection, "404 Not Found", len(body), b"" if method == "HEAD" else body)
            return rest
        start, stop = 0, len(found)
        if "range" in headers:
            low, _, high = headers["range"].removeprefix("bytes=").partition("-")
            start, stop = int(low), min(int(high) + 1, stop)
        told = f'ETag: "{len(found)}"\r\nContent-Range: bytes {start}-{stop - 1}/{len(found)}\r\n'
        body_view = memoryview(found)[start:stop]
        status = "206 Partial Content" if "range" in headers else "200 OK"
        self._say(connection, status, stop - start, b"" if method == "HEAD" else body_view, told)
        return rest

    def _upload_step(
        self, connection: socket.socket, path: str, query: str, headers: dict[str, str], rest: bytes
    ) -> bytes:  # fmt: skip
        """Begin an upload in parts, or end it. Return the bytes of the next request."""
        _, rest = _body(connection, headers, rest)
        if "uploadId" in query:
            parts = self._parts.pop(path)
            self._objects[path] = bytearray().join(parts[number] for number in sorted(parts))
            said = b"<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>"
        else:
            self._parts[path] = {}
            said = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
        self._say(connection, "200 OK", len(said), said)
        return rest

    def _say(
        self, connection: socket.socket, status: str, length: int, body: bytes | memoryview, told: str = ""
    ) -> None:
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{told}\r\n".encode())
        if len(body):
            connection.sendall(body)


def _body(connection: socket.socket, headers: dict[str, str], rest: bytes) -> tuple[bytearray, bytes]:
    """Read a request's body. ``rest``: bytes that were read behind its head. Return it, and what was read behind it."""
    byte_count = int(headers.get("content-length", 0))
    data = bytearray(byte_count)
    done = min(len(rest), byte_count)
    data[:done], rest = rest[:done], rest[done:]
    view = memoryview(data)
    while done < byte_count:
        count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionError
        done += count
    return data, rest


@contextmanager
def responder(first_byte_s: float = 0.0) -> Iterator[str]:
    """Run the server in a process of its own, and yield its URL."""
    command = [sys.executable, "-m", "kvstore_ops.bench.s3_responder", str(first_byte_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


if __name__ == "__main__":
    found = Responder(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)
    threading.Thread(target=found.serve, daemon=True).start()
    print(found.port, flush=True)
    sys.stdin.read()
