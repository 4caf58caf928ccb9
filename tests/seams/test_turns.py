"""Byte movers give way; nobody else's threads are touched."""

import os
import platform
import threading

import pytest

from kvstore.seams import WorkerThreads, give_way, turns


@pytest.fixture
def yields(monkeypatch):
    """The threads that gave way, in order."""
    seen = []
    monkeypatch.setattr(os, "sched_yield", lambda: seen.append(threading.get_ident()))
    return seen


@pytest.fixture
def clock(monkeypatch):
    """What perf_counter says."""
    now = [100.0]
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    return now


def on_a_mover(function, nice=0):
    threads = WorkerThreads(1, "test", nice=nice)
    try:
        return threads.submit(function).result()
    finally:
        threads.close()


def attributes():
    """This thread's, as the kernel says; None on a machine whose calls nobody knows."""
    calls = turns._CALLS.get(platform.machine())
    return calls and turns._attributes(calls[1])


def has_slices():
    """Of this kernel."""
    return on_a_mover(turns.ask_for_short_slices)


def needs_slices():
    if not has_slices():
        pytest.skip("this kernel has no slices of one's own: Linux 6.12 does")


def test_a_mover_gives_way_once_a_turn(yields, clock):
    needs_slices()

    def move():
        for _ in range(10):
            give_way()
            clock[0] += turns.TURN_S / 2.5
        return threading.get_ident()

    mover = on_a_mover(move)
    assert yields == [mover] * 4  # at 0, 1.2, 2.4 and 3.6 turns


def test_a_mover_has_short_slices_and_keeps_its_priority():
    needs_slices()

    def move():
        give_way()
        return attributes().slice_ns, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert on_a_mover(move, nice=7) == (turns.SLICE_NS, 7)


def test_a_thread_that_is_not_ours_is_left_alone(yields, clock):
    before = attributes()
    for _ in range(3):
        give_way()
        clock[0] += 1.0
    assert not yields
    assert attributes() == before


def test_without_short_slices_a_mover_keeps_its_turn(yields, clock, monkeypatch):
    """A whole slice given up for every piece would leave copies a third of their rate beside a busy engine."""
    monkeypatch.setattr(turns, "ask_for_short_slices", lambda: False)

    def move():
        for _ in range(3):
            give_way()
            clock[0] += 1.0

    on_a_mover(move)
    assert not yields


def test_a_policy_that_somebody_chose_stays():
    def move():
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return turns.ask_for_short_slices(), os.sched_getscheduler(0)

    assert on_a_mover(move) == (False, os.SCHED_BATCH)


def test_a_machine_whose_calls_nobody_knows(monkeypatch):
    monkeypatch.setattr(turns.platform, "machine", lambda: "other")
    assert on_a_mover(turns.ask_for_short_slices) is False
