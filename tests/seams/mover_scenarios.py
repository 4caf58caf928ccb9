"""What byte movers must do, each as a process of its own: forks of one that has used gRPC are forks of its threads.

python -m tests.seams.mover_scenarios NAME DIRECTORY
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.chunk import StripRun
from kvstore.errors import DataLoss, Internal, Unavailable
from kvstore.seams import MoverProcesses, SystemDisk, SystemMemory
from kvstore.seams.jobs import NotBegun
from kvstore.seams.movers import Lane
from kvstore.tiers.nvme import PosixIO
from tests.descriptors import open_files
from tests.seams.mover_jobs import (
    WAIT_S,
    done,
    double,
    find_a_lambda,
    holds_the_lock,
    is_stopped,
    lose,
    raise_stubborn,
    refuse,
    run,
    slow,
    total,
    until,
    whose,
)


def memory_that_is_sealed_for_everybody_else_is_written_by_movers(movers: MoverProcesses, _: Path) -> None:
    memory = SystemMemory(movers)
    target = memory.read_only_to_others("target", 1 << 16)
    source = memory.writable_by_others("source", 1 << 16)
    source.bytes[:] = 21

    async def scenario(lane: Lane) -> None:
        pid = await done(lane, double, source.bytes[4096:8192], target.bytes[100 : 100 + 4096])
        assert pid in movers.pids
        assert (target.bytes[100 : 100 + 4096] == 42).all()
        assert not target.bytes[:100].any()
        assert not target.bytes[100 + 4096 :].any()

    run(movers, scenario)
    source.close()
    target.close()


def memory_is_sealed_when_movers_that_are_late_have_it(movers: MoverProcesses, _: Path) -> None:
    """Once it is sealed nobody can map it to write any more."""
    for pid in movers.pids:
        os.kill(pid, signal.SIGSTOP)
    going_on = threading.Timer(0.5, lambda: [os.kill(pid, signal.SIGCONT) for pid in movers.pids])
    going_on.start()
    memory = SystemMemory(movers)
    target = memory.read_only_to_others("target", 4096)
    going_on.join()
    source = memory.writable_by_others("source", 4096)
    source.bytes[:] = 21

    async def scenario(lane: Lane) -> None:
        assert await done(lane, double, source.bytes, target.bytes) in movers.pids
        assert (target.bytes == 42).all()

    run(movers, scenario)
    source.close()
    target.close()


def memory_of_this_process_alone_is_worked_on_here(movers: MoverProcesses, _: Path) -> None:
    shared = SystemMemory(movers).writable_by_others("source", 4096)
    shared.bytes[:] = 4

    async def scenario(lane: Lane) -> None:
        own = np.zeros(4096, np.uint8)
        assert await done(lane, double, shared.bytes, own) == os.getpid()
        assert (own == 8).all()
        beyond = np.lib.stride_tricks.as_strided(shared.bytes[4000:], (200,), (1,))
        assert await done(lane, double, beyond[:96], own[:96]) == os.getpid()

    run(movers, scenario)
    shared.close()


def what_is_taken_back_is_let_go_by_the_movers(movers: MoverProcesses, tmp_path: Path) -> None:
    mapping = SystemMemory(movers).writable_by_others("kvstore-taken", 1 << 20)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    movers.lend(file)

    def held(pid: int) -> bool:
        maps = Path(f"/proc/{pid}/maps").read_text()
        return "kvstore-taken" in maps or str(tmp_path / "file") in open_files(pid)

    def is_let_go(pid: int) -> bool:
        return not held(pid)

    for pid in movers.pids:
        until(partial(held, pid))
    mapping.close()
    movers.take_back(file)
    os.close(file)
    for pid in movers.pids:
        until(partial(is_let_go, pid))


def a_number_is_never_taken_for_a_later_file(movers: MoverProcesses, tmp_path: Path) -> None:
    """Descriptors come back with another file behind them; what movers know a file by does not. The movers stand still
    while a file goes and the next one comes, so that a job may overtake what they are told of it."""

    async def scenario(lane: Lane) -> None:
        target = SystemMemory(movers).read_only_to_others("target", 4096)
        descriptor = -1
        for number in range(20):
            path = tmp_path / str(number)
            path.write_bytes(bytes([number]) * 4096)
            for pid in movers.pids:
                os.kill(pid, signal.SIGSTOP)
            if descriptor >= 0:
                movers.take_back(descriptor)
                os.close(descriptor)
            descriptor = movers.lend(os.open(path, os.O_RDWR))
            job = lane.submit(PosixIO(SystemDisk()).read, descriptor, 0, target.bytes)
            for pid in movers.pids:
                os.kill(pid, signal.SIGCONT)
            await asyncio.wrap_future(job)
            assert (target.bytes == number).all()
        target.close()

    run(movers, scenario)


def a_lock_stays_held_until_the_movers_let_go_of_it(movers: MoverProcesses, tmp_path: Path) -> None:
    """A server that was killed must not be followed by another one while its movers still write."""
    ours, theirs = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    fcntl.flock(ours, fcntl.LOCK_EX)
    movers.lend(ours)
    for pid in movers.pids:
        until(partial(holds_the_lock, pid))
    os.close(ours)
    assert not SystemDisk().lock(theirs, 0.05)
    movers.take_back(ours)
    assert SystemDisk().lock(theirs, WAIT_S)
    os.close(theirs)


def errors_cross_with_what_they_say(movers: MoverProcesses, _: Path) -> None:
    async def scenario(lane: Lane) -> None:
        with pytest.raises(DataLoss) as lost:
            await done(lane, lose, "checksum")
        assert (lost.value.message, lost.value.fields) == ("it is gone", {"reason": "checksum"})
        with pytest.raises(OSError, match="the device says no") as refused:
            await done(lane, refuse)
        assert refused.value.errno == errno.EIO
        with pytest.raises(Internal, match="Stubborn: cannot be"):
            await done(lane, raise_stubborn)
        with pytest.raises((AttributeError, TypeError), match="lambda"):
            await done(lane, find_a_lambda)
        assert await done(lane, whose) in movers.pids

    run(movers, scenario)


def a_job_that_is_too_large_to_tell_is_done_here(movers: MoverProcesses, _: Path) -> None:
    async def scenario(lane: Lane) -> None:
        numbers = np.arange(1 << 16)
        assert await done(lane, total, numbers) == int(numbers.sum())
        assert await done(lane, total, numbers[:100]) == 4950

    run(movers, scenario)


def more_jobs_than_the_socket_holds_are_all_done_by_both(movers: MoverProcesses, _: Path) -> None:
    async def scenario(lane: Lane) -> None:
        strips = StripRun(b"k" * 32, *(np.arange(200, dtype=np.int32) for _ in range(2)), *(np.arange(200),) * 2)
        pids = await asyncio.gather(*(done(lane, tell, strips, number) for number in range(3000)))
        assert [number for number, _ in pids] == list(range(3000))
        assert {pid for _, pid in pids} == set(movers.pids)

    run(movers, scenario, 4)


def tell(strips: StripRun, number: int) -> tuple[int, int]:
    assert strips.stops.tolist() == list(range(200))
    return number, os.getpid()


def a_job_that_nobody_waits_for_any_more_is_not_begun(movers: MoverProcesses, _: Path) -> None:
    async def scenario(lane: Lane) -> None:
        memory = SystemMemory(movers).writable_by_others("marks", 4096)
        target = SystemMemory(movers).read_only_to_others("target", 4096)
        memory.bytes[:] = 3
        busy = [lane.submit(slow, 0.1) for _ in range(8)]
        late = asyncio.wrap_future(lane.submit(double, memory.bytes, target.bytes))
        late.cancel()
        await asyncio.gather(*map(asyncio.wrap_future, busy))
        await done(lane, whose)
        assert not target.bytes.any()
        memory.close()
        target.close()

    run(movers, scenario)


def closing_finishes_what_was_taken(movers: MoverProcesses, _: Path) -> None:
    async def scenario() -> None:
        lane = movers.lane("test", 2)
        jobs = [lane.submit(slow, 0.02) for _ in range(20)]
        lane.close()
        lane.close()
        assert all(job.result() in movers.pids for job in jobs)
        with pytest.raises(RuntimeError, match="closed"):
            lane.submit(whose)

    asyncio.run(scenario())


def a_mover_that_ends_is_told_of_and_its_jobs_end(movers: MoverProcesses, _: Path) -> None:
    async def scenario(lane: Lane) -> None:
        ended = asyncio.Event()
        movers.watch(ended.set)
        jobs = [asyncio.wrap_future(lane.submit(slow, 60.0)) for _ in range(6)]
        await asyncio.sleep(0.1)
        for pid in movers.pids:
            os.kill(pid, signal.SIGKILL)
        await ended.wait()
        for found in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(found, Internal)

    run(movers, scenario)


def a_signal_to_all_processes_of_the_service_ends_no_mover(movers: MoverProcesses, _: Path) -> None:
    """As "systemctl kill" sends it, and a terminal. The service alone has a word for each."""

    async def scenario(lane: Lane) -> None:
        async def who_work() -> set[int]:
            return set(await asyncio.gather(*(done(lane, slow, 0.02) for _ in range(20))))

        assert await who_work() == set(movers.pids)
        for pid in movers.pids:
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                os.kill(pid, number)
        assert await who_work() == set(movers.pids)

    run(movers, scenario)


def a_mover_that_answers_too_late_ends_with_the_others(movers: MoverProcesses, _: Path) -> None:
    """Its answer would be taken for the next one's."""
    for control in movers._controls:
        control.settimeout(0.2)
    os.kill(movers.pids[0], signal.SIGSTOP)
    until(lambda: is_stopped(movers.pids[0]))
    with pytest.raises(Unavailable, match="does not answer"):
        SystemMemory(movers).read_only_to_others("late", 4096)
    for descriptor in movers._descriptors:
        assert select.select([descriptor], [], [], WAIT_S)[0]


def movers_that_end_with_jobs_unread_fail_them(movers: MoverProcesses, _: Path) -> None:
    async def scenario(lane: Lane) -> None:
        for pid in movers.pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in movers.pids:
            until(partial(is_stopped, pid))
        jobs = [asyncio.wrap_future(lane.submit(whose)) for _ in range(8)]
        for pid in movers.pids:
            os.kill(pid, signal.SIGKILL)
        for found in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(found, Internal)

    run(movers, scenario)


class FullSocket:
    """A lane's socket for which the kernel has no memory just now."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.refusals = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def send(self, packet: bytes) -> int:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return int(self._real.send(packet))


def a_job_that_could_not_be_sent_is_never_done(movers: MoverProcesses, _: Path) -> None:
    """Whoever is told so gives the job's memory to somebody else."""

    async def scenario(lane: Lane) -> None:
        memory = SystemMemory(movers).writable_by_others("marks", 4096)
        target = SystemMemory(movers).read_only_to_others("target", 8192)
        memory.bytes[:] = 3
        lane._jobs = socket = FullSocket(lane._jobs)  # type: ignore[assignment]
        socket.refusals = 1
        with pytest.raises(NotBegun, match="no jobs"):
            await done(lane, double, memory.bytes, target.bytes[:4096])
        assert await done(lane, double, memory.bytes, target.bytes[4096:]) in movers.pids
        assert not target.bytes[:4096].any()
        assert (target.bytes[4096:] == 6).all()
        memory.close()
        target.close()

    run(movers, scenario)


def shut_up() -> None:
    """Leave the thread that does this job without a way to answer."""
    sys._getframe(2).f_locals["lane"].close()


def a_mover_that_cannot_answer_ends(movers: MoverProcesses, _: Path) -> None:
    """A job of which nobody hears would keep its memory, and who waits for it, for ever."""

    async def scenario(lane: Lane) -> None:
        ended = asyncio.Event()
        movers.watch(ended.set)
        lane.submit(shut_up)
        await ended.wait()

    run(movers, scenario)


def what_does_not_cross_is_done_by_as_many_threads(movers: MoverProcesses, _: Path) -> None:
    async def scenario(lane: Lane) -> None:
        own = np.zeros(4096, np.uint8)
        there, gone = threading.Barrier(4, timeout=WAIT_S), [lane.submit(meet, own) for _ in range(4)]
        meeting.append(there)
        for each in gone:
            assert (await asyncio.wrap_future(each)) == 5

    run(movers, scenario, 4)


meeting: list[threading.Barrier] = []


def meet(_memory: np.ndarray) -> int:
    while not meeting:
        time.sleep(0.001)
    meeting[0].wait()
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


SCENARIOS = (
    memory_that_is_sealed_for_everybody_else_is_written_by_movers,
    memory_is_sealed_when_movers_that_are_late_have_it,
    memory_of_this_process_alone_is_worked_on_here,
    what_is_taken_back_is_let_go_by_the_movers,
    a_number_is_never_taken_for_a_later_file,
    a_lock_stays_held_until_the_movers_let_go_of_it,
    errors_cross_with_what_they_say,
    a_job_that_is_too_large_to_tell_is_done_here,
    more_jobs_than_the_socket_holds_are_all_done_by_both,
    a_job_that_nobody_waits_for_any_more_is_not_begun,
    closing_finishes_what_was_taken,
    a_mover_that_ends_is_told_of_and_its_jobs_end,
    a_signal_to_all_processes_of_the_service_ends_no_mover,
    a_mover_that_answers_too_late_ends_with_the_others,
    movers_that_end_with_jobs_unread_fail_them,
    a_job_that_could_not_be_sent_is_never_done,
    a_mover_that_cannot_answer_ends,
    what_does_not_cross_is_done_by_as_many_threads,
)

if __name__ == "__main__":
    chosen = next(each for each in SCENARIOS if each.__name__ == sys.argv[1])
    movers = MoverProcesses(2)
    try:
        chosen(movers, Path(sys.argv[2]))
    finally:
        movers.close()
