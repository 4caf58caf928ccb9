"""Lines on a terminal, until somebody quits."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore_ops.door import door_of
from kvstore_ops.operators.calls import Operator
from kvstore_ops.options import AddressOption, TenantOption, TlsOption
from kvstore_ops.top.frame import lines_of
from kvstore_ops.top.sample import Sample, take_sample

INTERVAL_S_MIN = 0.2


def top(
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    count: Annotated[int, typer.Option(help="End after so many looks; 0: go on until q or an interrupt.")] = 0,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
) -> None:
    """Show what the sidecar does, live: tiers, flows, models, alarms. q quits.

    Example: kvstore top --interval 1
    """
    if interval < INTERVAL_S_MIN:
        raise InvalidRequest(f"--interval {interval}: use {INTERVAL_S_MIN} or more")
    console = Console()
    with suppress(KeyboardInterrupt), door_of(address, tenant, tls).open() as client, _keys() as keys:
        frames = _frames(Operator(client), console, interval, keys)
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


def _frames(asked: Operator, console: Console, interval_s: float, keys: int | None) -> Iterator[Group]:
    """One after each look, until somebody quits. A sidecar that goes is shown as it was, until it is there again."""
    first: Sample | None = None
    last = take_sample(asked, time.monotonic())
    problem = ""
    while True:
        lines = lines_of(first, last, console.width, problem)
        yield Group(*(lines[: max(1, console.height - 1)] if console.is_terminal else lines))
        if _quits(keys, interval_s):
            return
        try:
            first, last, problem = last, take_sample(asked, time.monotonic()), ""
        except KVStoreError as error:
            problem = error.message


@contextmanager
def _keys() -> Iterator[int | None]:
    """Where keys come from, each at once and unseen; None where nobody sits. The terminal is as it was afterwards."""
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


def _quits(keys: int | None, seconds: float) -> bool:
    """Wait for the next look. True when somebody said q meanwhile, or hung up."""
    if keys is None:
        time.sleep(seconds)
        return False
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        if select.select([keys], [], [], left_s)[0] and os.read(keys, 1) in (b"q", b"Q", b""):
            return True
    return False


def register(app: typer.Typer) -> None:
    """Make it a command of ``app``."""
    app.command()(top)
