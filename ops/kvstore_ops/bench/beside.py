"""Processes beside a benchmark: an operator's listings at a rate, a ``top``, and a receiver of spans.

    python -m kvstore_ops.bench.beside listings ADDRESS PER_MINUTE
    python -m kvstore_ops.bench.beside top ADDRESS
    python -m kvstore_ops.bench.beside spans

Each prints a line once it is ready (the receiver its address), runs until its input ends, and prints then how many
listings, samples or spans there were. The first two stand still until they are told to go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from kvstore_client import connect

from kvstore.v1alpha import admin_pb2
from kvstore_ops.operators.calls import Operator
from kvstore_ops.top.frame import lines_of
from kvstore_ops.top.sample import Sample, take_sample

LISTERS = 4
"""Threads that list: one alone waits for each answer."""
LIMIT = 10
"""Chunks that a listing shows; its totals are of all."""
TOP_EVERY_S = 1.0
ENDS_S_MAX = 30.0


class Process:
    """One of these programs, which begins at once. ``count``: what it told at its end."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "kvstore_ops.bench.beside", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.count = 0

    @cached_property
    def ready(self) -> str:
        """Its first line: waits until it is ready."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Have it go on during the block, and stand still otherwise."""
        assert self.ready
        self._wait_stopped()
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def _wait_stopped(self) -> None:
        """Wait until it stands still: a signal that came before would be lost."""
        until_s = time.monotonic() + ENDS_S_MAX
        while Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            if time.monotonic() > until_s:
                raise TimeoutError("a process beside the benchmark does not stand still")
            time.sleep(0.01)

    def end(self) -> None:
        """End its input, and wait for it. Raises TimeoutExpired when it does not end."""
        self._process.send_signal(signal.SIGCONT)
        try:
            told = self._process.communicate(timeout=ENDS_S_MAX)[0]
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        self.count = int((told.split() or ["0"])[-1])


@contextmanager
def running(*arguments: str) -> Iterator[Process]:
    """Have one of the programs run during the block. Its ``count`` is known behind it."""
    process = Process(*arguments)
    try:
        yield process
    finally:
        process.end()


class Counted:
    """Threads that call something, each ``every_s`` seconds if it is done by then, until the input ends."""

    def __init__(self, every_s: float, calls: list[Callable[[], object]]) -> None:
        self._every_s = every_s
        self._ended = threading.Event()
        self._counts = [0] * len(calls)
        self._threads = [
            threading.Thread(target=self._go, args=(number, call), daemon=True) for number, call in enumerate(calls)
        ]

    def run(self) -> int:
        """Run until the input ends. Return how many calls were made."""
        print("ready", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)  # until ``at_work``
        for thread in self._threads:
            thread.start()
        sys.stdin.read()
        self._ended.set()
        for thread in self._threads:
            thread.join(ENDS_S_MAX / 2)
        return sum(self._counts)

    def _go(self, number: int, call: Callable[[], object]) -> None:
        due_s = time.monotonic() + self._every_s * number / len(self._threads)
        while not self._ended.wait(max(0.0, due_s - time.monotonic())):
            call()
            self._counts[number] += 1
            due_s = max(due_s + self._every_s, time.monotonic() - self._every_s)  # what was missed is not made up for


def list_at(address: str, per_minute: float) -> int:
    """List chunks at a rate, or as fast as the answers come. Return how often."""
    with connect(address) as client:
        asked = Operator(client)

        def listing() -> None:
            for _ in asked.chunks(admin_pb2.Selection(), LIMIT):
                pass

        return Counted(60.0 * LISTERS / per_minute, [listing] * LISTERS).run()


def look_at(address: str) -> int:
    """Sample and draw as ``kvstore top`` does. Return how often."""
    with connect(address) as client:
        asked = Operator(client)
        last: list[Sample] = [take_sample(asked, time.monotonic())]

        def look() -> None:
            before, last[0] = last[0], take_sample(asked, time.monotonic())
            lines_of(before, last[0], 80)

        return Counted(TOP_EVERY_S, [look]).run()


class Receiver:
    """A receiver of OTLP that counts spans."""

    def __init__(self) -> None:
        self.count = 0

    def Export(self, request: Any, context: object) -> Any:  # noqa: N802 - the service's name
        """Count the spans of one message."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        self.count += sum(len(scope.spans) for each in request.resource_spans for scope in each.scope_spans)
        return ExportTraceServiceResponse()


def receive() -> int:
    """Receive spans until the input ends. Return how many came."""
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

    receiver, server = Receiver(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"http://127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.stop(None)
    return receiver.count


def main(name: str, *arguments: str) -> int:
    """Run one of the programs, and return its count."""
    if name == "listings":
        return list_at(arguments[0], float(arguments[1]))
    return look_at(arguments[0]) if name == "top" else receive()


if __name__ == "__main__":
    print(main(*sys.argv[1:]), flush=True)
