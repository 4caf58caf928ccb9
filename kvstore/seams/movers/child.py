"""A mover process: it follows the service's orders until the service is gone."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from kvstore.errors import Internal, Unavailable
from kvstore.seams.mapping import Bytes, SharedMap
from kvstore.seams.movers.crossing import Failure, number_of, pack_answer, resolve_with, unpack, unpack_order
from kvstore.seams.scheduler import lower_priority, start_thread

PACKET_BYTES_MAX = 1 << 17
ARRIVAL_TIMEOUT_S = 10.0
"""Longest wait of a job for the memory or the file that it names. Both were sent before the job."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_log = logging.getLogger("kvstore.movers")


def run(control: socket.socket, parent_pid: int) -> NoReturn:
    """Serve until the service ends, then end this process. Never returns."""
    status = 1
    try:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the service handles them, and needs movers until it ends
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NAME, b"kvstore-mover", 0, 0, 0)
        if os.getppid() != parent_pid:
            _leave(0)
        _keep_only(control.fileno())
        _Mover(control).listen()
        status = 0
    except Unavailable as error:
        _log.error(f"a byte mover ends: {error.message}")
    except BaseException:  # noqa: BLE001 - nobody else could say it
        traceback.print_exc()
    finally:
        _leave(status)


def _leave(status: int) -> NoReturn:
    os._exit(status)  # runs no exit handlers: the fork inherited them from the service


def _keep_only(kept: int) -> None:
    """Close all inherited files but ``kept``. Else the sockets of other movers would hide from them that the service
    has ended, and its output would stay open."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


class _Mover:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._things: dict[int, SharedMap | int] = {}
        self._arrived = threading.Condition()
        resolve_with(self._bytes, self._file)

    def _thing(self, number: int) -> SharedMap | int:
        with self._arrived:
            if not self._arrived.wait_for(lambda: number in self._things, ARRIVAL_TIMEOUT_S):
                raise Internal("a byte mover was never given the memory or the file that its job names")
            return self._things[number]

    def _bytes(self, number: int, offset: int, byte_count: int) -> Bytes:
        found = self._thing(number)
        assert isinstance(found, SharedMap)
        return found.bytes[offset : offset + byte_count]

    def _file(self, number: int) -> int:
        found = self._thing(number)
        assert isinstance(found, int)
        return found

    def listen(self) -> None:
        """Follow orders until the service closes the socket."""
        while True:
            packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET_BYTES_MAX, 1)
            if not packet:
                return
            order, *rest = unpack_order(packet)
            getattr(self, f"_order_{order}")(descriptors, *rest)

    def _order_map(self, descriptors: Sequence[int], number: int, byte_count: int, writable: bool, told: bool) -> None:
        try:
            if not descriptors:
                raise Unavailable("this process has no open file more to take it with")
            self._keep(number, SharedMap(descriptors[0], byte_count, writable=writable))
            answer = b"mapped"
        except Unavailable as error:
            answer = error.message.encode()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if told:
            self._control.send(answer)

    def _order_file(self, descriptors: Sequence[int], number: int) -> None:
        if descriptors:  # else this process may open no more files, and jobs that name this one fail
            self._keep(number, descriptors[0])

    def _keep(self, number: int, thing: SharedMap | int) -> None:
        with self._arrived:
            self._things[number] = thing
            self._arrived.notify_all()

    def _order_drop(self, _: Sequence[int], number: int) -> None:
        with self._arrived:
            thing = self._things.pop(number, None)
        if isinstance(thing, int):
            os.close(thing)

    def _order_lane(self, descriptors: Sequence[int], name: str, thread_count: int, nice: int) -> None:
        if not thread_count:
            os.close(descriptors[0])
            return
        lane = socket.socket(fileno=descriptors[0])
        for number in range(thread_count):
            start_thread(partial(_serve, lane, nice), f"{name}-{number}")


def _serve(lane: socket.socket, nice: int) -> None:
    """Run one thread of a lane: a job at a time, until the service closes the lane. A thread that cannot answer ends
    its process, and so the service: without an answer the job might still run, and its memory could never be freed."""
    try:
        lower_priority(nice)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while packet := lane.recv(PACKET_BYTES_MAX):
                try:
                    lane.send(_done(packet))
                except OSError as error:
                    if error.errno != errno.EMSGSIZE:
                        raise
                    lane.send(_failed(number_of(packet), Internal("what the job found is too large to tell")))
    except BaseException:  # noqa: BLE001 - nobody else could say it
        traceback.print_exc()
        _leave(1)
    # All of a lane's threads see the end; the socket itself is closed with the last of them, or with the process.


def _done(packet: bytes) -> bytes:
    """Run a job, and return the packet with its result or its error."""
    number = number_of(packet)
    try:
        function, args = unpack(packet)
        return pack_answer(number, function(*args))
    except BaseException as error:  # noqa: BLE001 - the answer carries whatever the job raised
        return _failed(number, error)


def _failed(number: int, error: BaseException) -> bytes:
    try:
        answer = pack_answer(number, Failure(error))
        unpack(answer)
    except Exception:  # noqa: BLE001 - an error that does not cross goes as its words
        return pack_answer(number, Failure(Internal(f"{type(error).__name__}: {error}")))
    return answer
