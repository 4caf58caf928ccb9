"""Lines on a terminal, until the user quits."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore_ops.door import door_of
from kvstore_ops.operators.calls import Operator
from kvstore_ops.options import TERMINATED, AddressOption, TenantOption, TlsOption
from kvstore_ops.top.frame import lines_of
from kvstore_ops.top.others import others_of
from kvstore_ops.top.sample import Sample, take_sample

INTERVAL_S_MIN, INTERVAL_S_MAX = 0.2, 86400.0


def top(
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    count: Annotated[int, typer.Option(help="End after so many looks; 0: go on until q or an interrupt.", min=0)] = 0,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
) -> None:
    """Show the sidecar live: tiers, flows, models, alarms. q quits.

    Example: kvstore top --interval 1
    """
    if not INTERVAL_S_MIN <= interval <= INTERVAL_S_MAX:
        raise InvalidRequest(f"--interval {interval}: use {INTERVAL_S_MIN} to {INTERVAL_S_MAX:.0f}")
    console = Console()
    door = door_of(address, tenant, tls)
    with (
        _interrupt() as ended, door.open() as client, others_of(door, is_default=not tenant) as others,
        _keys() as keys,
    ):  # fmt: skip
        asked = Operator(client)
        frames = _frames(lambda: take_sample(asked, time.monotonic(), others), console, interval, keys, ended)
        if not console.is_terminal:
            for number, frame in enumerate(frames, 1):
                console.print(frame)
                if number == count:
                    return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for number, frame in enumerate(frames, 1):
                live.update(frame, refresh=True)
                if number == count:
                    return
    if ended.is_terminated:  # and the terminal is as it was
        raise typer.Exit(TERMINATED)


def _frames(
    look: Callable[[], Sample], console: Console, interval_s: float, keys: int | None, ended: Ended
) -> Iterator[Group]:
    """Yield a frame after each sample, until the user quits. While the sidecar does not answer, the last sample is
    shown with the problem."""
    first: Sample | None = None
    last = look()
    problem = ""
    while True:
        lines = lines_of(first, last, console.width, problem)
        yield Group(*(lines[: max(1, console.height - 1)] if console.is_terminal else lines))
        if _quits(keys, interval_s, ended):
            return
        try:
            first, last, problem = last, look(), ""
        except KVStoreError as error:
            problem = error.message


@contextmanager
def _keys() -> Iterator[int | None]:
    """Yield the descriptor from which keys are read, each at once and without echo; None when there is no terminal.
    The terminal's mode is restored at the end."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):  # no terminal, or none that can be set
        yield None
        return
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Ended(threading.Event):
    """Set once an interrupt or SIGTERM has come."""

    is_terminated = False


@contextmanager
def _interrupt() -> Iterator[Ended]:
    """Yield an event that an interrupt or SIGTERM sets. The first one raises nothing, because an exception would be
    lost inside a callback of gRPC. The second one raises KeyboardInterrupt."""
    ended = Ended()

    def note(number: int, _frame: object) -> None:
        if ended.is_set():
            raise KeyboardInterrupt
        ended.is_terminated = number == signal.SIGTERM
        ended.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _quits(keys: int | None, seconds: float, ended: Ended) -> bool:
    """Wait for the next sample. True when the user typed q meanwhile, interrupted, or closed the input."""
    if keys is None:
        return ended.wait(seconds)
    until_s = time.monotonic() + seconds
    while not ended.is_set() and (left_s := until_s - time.monotonic()) > 0:
        is_there = select.select([keys], [], [], min(left_s, INTERVAL_S_MIN))[0]
        if is_there and os.read(keys, 1) in (b"q", b"Q", b""):
            return True
    return ended.is_set()


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(top)
