"""How long threads that move bytes keep a processor that others wait for.

The kernel lets a thread that computes go on until a tick, 4 ms later where ticks are that far apart. An engine's loop,
or a lookup, that wakes up beside a long copy waits for that tick. So the sidecar's byte movers give way between two
pieces of a copy. What a thread gives up by that is the rest of its slice, milliseconds by default: so a mover's slices
are short first. Where the kernel has none (before Linux 6.12) movers keep their turn. See ops/decisions/0010.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
import time
from typing import NamedTuple

SLICE_NS = 100_000
"""The shortest the kernel has."""
TURN_S = SLICE_NS / 1e9
"""How long a mover goes on before it gives way: a slice is what each turn costs it where all processors are taken."""
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""The numbers of sched_setattr and sched_getattr, which not every C library knows."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
_libc = ctypes.CDLL(None)


class _Attributes(NamedTuple):
    """As the kernel's sched_attr. ``slice_ns`` is what it calls runtime."""

    size: int
    policy: int
    flags: int
    nice: int
    priority: int
    slice_ns: int
    deadline_ns: int
    period_ns: int


class _Turn(threading.local):
    is_mover = False
    has_short_slices: bool | None = None
    began_s = 0.0


_turn = _Turn()


def be_mover(nice: int) -> None:
    """From now on this thread, which is ours, moves bytes. ``nice`` lowers its priority."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    _turn.is_mover = True


def give_way() -> None:
    """Between two pieces of a long copy: whoever waits for this processor may go first, if this thread is a mover and
    gave way more than TURN_S ago. Cost: 0.2 us, and 1 us where a turn ends. Lets go of the GIL, which beside threads
    that run Python may come back 5 ms later: not for threads of an engine's process."""
    now = time.perf_counter()
    if not _turn.is_mover or now - _turn.began_s < TURN_S:
        return
    if _turn.has_short_slices is None:
        _turn.has_short_slices = ask_for_short_slices()
    if _turn.has_short_slices:
        os.sched_yield()
        now = time.perf_counter()
    _turn.began_s = now


def ask_for_short_slices() -> bool:
    """Whether this thread's slices are SLICE_NS from now on. Not where somebody has chosen another policy for it, nor
    where the kernel does not have it."""
    calls = _CALLS.get(platform.machine())
    now = _attributes(calls[1]) if calls else None
    if calls is None or now is None or now.policy != os.SCHED_OTHER:
        return False
    wanted = _ATTRIBUTES.pack(*now._replace(slice_ns=SLICE_NS))
    _libc.syscall(calls[0], 0, wanted, 0)
    then = _attributes(calls[1])
    return then is not None and then.slice_ns == SLICE_NS


def _attributes(call: int) -> _Attributes | None:
    """This thread's."""
    found = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if _libc.syscall(call, 0, found, _ATTRIBUTES.size, 0):
        return None
    return _Attributes(*_ATTRIBUTES.unpack(found.raw))
