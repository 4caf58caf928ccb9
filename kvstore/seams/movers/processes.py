"""The service's side: it starts the mover processes, lends them memory and files, and gives them jobs.

``MoverProcesses`` is made before the process has threads or secrets, because the movers are forks of the process.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from kvstore.errors import Internal, Unavailable
from kvstore.seams.jobs import NotBegun
from kvstore.seams.mapping import Bytes
from kvstore.seams.movers import child
from kvstore.seams.movers.crossing import Failure, File, NotLent, Packer, number_of, pack_order, unpack
from kvstore.seams.scheduler import MORE_DESCRIPTORS, OUT_OF_DESCRIPTORS, Result, WorkerThreads

JOB_BYTES_MAX = 1 << 16
"""Largest packet of a job. A larger one (thousands of tiny strips) is done by a thread of the service instead."""
AHEAD = 2
"""Jobs per thread that are sent ahead: one that runs, and the next one, so that the thread does not wait for it."""
ORDER_TIMEOUT_S = 5.0
NOT_PASSED = (*OUT_OF_DESCRIPTORS, errno.EMSGSIZE, errno.ENOBUFS, errno.ENOMEM)
LAST_ANSWER_TIMEOUT_S = 3.0
END_TIMEOUT_S = 1.0


class MoverProcesses:
    """``count`` forks of this process. Only the service lends memory and files and makes lanes; users of a lane see
    ``Workers``.

    Raises: Unavailable when a mover does not follow an order; all movers have been killed then.
    """

    def __init__(self, count: int) -> None:
        self._numbers = itertools.count(1)
        self._packer = Packer()
        self._lock = threading.Lock()
        self._controls: list[socket.socket] = []
        self._descriptors: list[int] = []
        self.pids: list[int] = []
        gc.freeze()  # forks never collect objects from before, so that their pages stay shared
        try:
            for _ in range(count):
                self._start(os.getpid())
        except OSError as error:
            self.close()
            raise Unavailable(
                f"cannot start byte movers ({error}): allow this user more processes (ulimit -u), and the calls fork "
                "and pidfd_open (Linux 5.3)"
            ) from error
        finally:
            gc.unfreeze()

    def _start(self, parent_pid: int) -> None:
        ours, theirs = _packets()
        with theirs:
            self._controls.append(ours)
            pid = os.fork()
            if pid == 0:
                child.run(theirs, parent_pid)
        self.pids.append(pid)
        self._descriptors.append(os.pidfd_open(pid))

    def watch(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` from the running loop when a mover ends by itself."""
        loop = asyncio.get_running_loop()
        for descriptor in self._descriptors:
            loop.add_reader(descriptor, self._ended, descriptor, ended)

    def _ended(self, descriptor: int, ended: Callable[[], None]) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        ended()

    # ------------------------------------------------------------ what jobs may name

    def lend_memory(self, descriptor: int, memory: Bytes, *, writable: bool) -> int:
        """Have the movers map a shared memory file of ours, which lies at ``memory`` here. Returns its number. A
        writable file is mapped by all movers when this returns, so that it can be sealed."""
        with self._lock:
            number = next(self._numbers)
            self._pass(descriptor, number, "map", memory.size, writable, writable, is_answered=writable)
            self._packer.add_map(number, memory)
            return number

    def take_back_memory(self, number: int) -> None:
        """Let the movers unmap memory. Call it when no job names it any more."""
        with self._lock:
            self._packer.drop_map(number)
            self._order("drop", number)

    def lend(self, descriptor: int) -> int:
        """Pass an open file to the movers, and return the number by which jobs name it: the descriptor itself. The
        movers keep it open, and its lock held, until it is taken back."""
        with self._lock:
            number = next(self._numbers)
            self._pass(descriptor, number, "file")
            self._packer.add_file(number, descriptor)
            return File(descriptor)

    def take_back(self, descriptor: int) -> None:
        """Let the movers close a file. Call it before the descriptor is closed, when no job names it any more."""
        with self._lock:
            self._order("drop", self._packer.drop_file(descriptor))

    def _pass(self, descriptor: int, number: int, order: str, *rest: object, is_answered: bool = False) -> None:
        """Pass a descriptor to all movers or none. Raises Unavailable when the kernel passes no more descriptors now,
        or a mover cannot map the memory: the order is undone then."""
        packet = pack_order(order, number, *rest)
        told: list[socket.socket] = []
        refusal: Unavailable | None = None
        for control in self._controls:
            try:
                socket.send_fds(control, [packet], [descriptor])
                told.append(control)
            except OSError as error:
                if error.errno not in NOT_PASSED:
                    raise self._given_up(f"takes no orders ({error})") from error
                refusal = Unavailable(f"byte movers cannot be lent memory or files now ({error}): {MORE_DESCRIPTORS}")
                break
        answers = [self._heard(control) for control in told] if is_answered else []
        wrong = next((answer for answer in answers if answer != b"mapped"), None)
        if wrong is not None:
            refusal = Unavailable(f"a byte mover cannot map memory: {wrong.decode()}")
        if refusal is not None:
            for control in told:
                self._tell(control, pack_order("drop", number), [])
            raise refusal

    def _order(self, *order: object) -> None:
        for control in self._controls:
            self._tell(control, pack_order(*order), [])

    def _tell(self, control: socket.socket, packet: bytes, descriptors: list[int]) -> None:
        try:
            socket.send_fds(control, [packet], descriptors)
        except OSError as error:
            raise self._given_up(f"takes no orders ({error})") from error

    def _heard(self, control: socket.socket) -> bytes:
        try:
            answer = control.recv(4096)
        except OSError as error:
            raise self._given_up(f"does not answer ({error})") from error
        if not answer:
            raise self._given_up("ended")
        return answer

    def _given_up(self, reason: str) -> Unavailable:
        """Kill all movers, which ends the service too: a mover that did not follow an order, or may not have, cannot be
        used."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return Unavailable(f"a byte mover {reason}: the server ends, start it again")

    # ------------------------------------------------------------ jobs

    def lane(self, name: str, thread_count: int, *, nice: int = 0) -> Lane:
        """Return a lane: ``thread_count`` threads of the movers, with a queue of their own. Call it in the running
        loop."""
        ours, theirs = _packets()
        with self._lock:
            for index, control in enumerate(self._controls):
                share = len(range(index, thread_count, len(self._controls)))
                self._tell(control, pack_order("lane", name, share, nice), [theirs.fileno()])
        theirs.close()
        return Lane(name, thread_count, nice, ours, self._packer)

    def close(self) -> None:
        """End the movers; kill one that does not end. Close the lanes first. Idempotent."""
        for control in self._controls:
            control.close()
        for pid, descriptor in itertools.zip_longest(self.pids, self._descriptors):
            if descriptor is None or not _is_ready(descriptor, END_TIMEOUT_S):
                os.kill(pid, signal.SIGKILL)
            if descriptor is not None:
                _is_ready(descriptor, END_TIMEOUT_S)
                os.close(descriptor)
            with suppress(ChildProcessError):  # where SIGCHLD is ignored: the kernel has reaped the process
                os.waitpid(pid, os.WNOHANG)  # do not wait: a device may hold the process for long
        self._controls, self._descriptors, self.pids = [], [], []


def _is_ready(descriptor: int, timeout_s: float) -> bool:
    """True when the descriptor becomes readable within ``timeout_s``."""
    waiting = select.poll()  # select itself takes no descriptor above 1,023
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(timeout_s * 1000))


def _packets() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(ORDER_TIMEOUT_S)
    theirs.settimeout(None)
    return ours, theirs


class Lane:
    """``Workers`` whose threads are in the mover processes. Jobs are submitted from the running loop's thread, and are
    functions of a module. Of their side effects, the service sees only those on shared memory and files."""

    def __init__(self, name: str, count: int, nice: int, jobs: socket.socket, packer: Packer) -> None:
        self._name = name
        self._count = count
        self._nice = nice
        self._jobs = jobs
        self._packer = packer
        self._numbers = itertools.count()
        self._waiting: deque[tuple[bytes, int, Future[Any]]] = deque()
        self._sent: dict[int, Future[Any]] = {}
        self._here: WorkerThreads | None = None
        self._closed = False
        jobs.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(jobs.fileno(), self._answered)

    def submit(self, function: Callable[..., Result], /, *args: object) -> Future[Result]:
        if self._closed:
            raise RuntimeError("cannot submit to movers that were closed")
        number = next(self._numbers)
        try:
            packet = self._packer.pack(number, function, args)
        except NotLent:
            return self._submit_here(function, *args)
        if len(packet) > JOB_BYTES_MAX:
            return self._submit_here(function, *args)
        future: Future[Result] = Future()
        self._waiting.append((packet, number, future))
        self._send()
        return future

    def _submit_here(self, function: Callable[..., Result], /, *args: object) -> Future[Result]:
        """Submit a job that cannot be sent to a mover to a thread of this process."""
        self._here = self._here or WorkerThreads(self._count, self._name, nice=self._nice)
        return self._here.submit(function, *args)

    def _send(self) -> None:
        while self._waiting and len(self._sent) < self._count * AHEAD:
            packet, number, future = self._waiting[0]
            if future.cancelled():
                self._waiting.popleft()
                continue
            try:
                self._jobs.send(packet)
            except BlockingIOError:
                return  # the socket is full: the answer to one of its jobs calls this method again
            except OSError as error:  # the job was not sent and never will be: its memory is free again
                self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_exception(NotBegun(f"the byte movers take no jobs: {error}"))
                continue
            self._waiting.popleft()
            future.set_running_or_notify_cancel()
            self._sent[number] = future

    def _answered(self) -> None:
        while True:
            try:
                packet = self._jobs.recv(child.PACKET_BYTES_MAX)
            except BlockingIOError:
                break
            except ConnectionResetError:
                packet = b""  # the movers ended with unread jobs
            if not packet:
                self._lost()
                return
            future = self._sent.pop(number_of(packet))
            try:
                found = unpack(packet)
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
                found = Failure(error)
            if isinstance(found, Failure):
                future.set_exception(found.error)
            else:
                future.set_result(found)
        self._send()

    def _lost(self) -> None:
        """Fail all jobs, because the movers do not answer any more."""
        self._loop.remove_reader(self._jobs.fileno())
        self._closed = True
        for _, _, future in self._waiting:
            future.set_running_or_notify_cancel()
        for future in [*self._sent.values(), *(future for _, _, future in self._waiting)]:
            if not future.done():
                future.set_exception(Internal("the byte movers do not answer"))
        self._sent.clear()
        self._waiting.clear()

    def close(self) -> None:
        """Stop taking jobs, finish those taken, then return. Fail them when the movers do not answer. Idempotent."""
        if self._jobs.fileno() < 0:
            return
        self._closed = True
        while self._sent or self._waiting:
            if not _is_ready(self._jobs.fileno(), LAST_ANSWER_TIMEOUT_S):
                self._lost()
                break
            self._answered()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._jobs.fileno())
        self._jobs.close()
        if self._here is not None:
            self._here.close()
