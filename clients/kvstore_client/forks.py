"""A forked child makes threads and locks anew: at the fork itself, while it has one thread, so that it does not matter
what it asks for first."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

_renewals: set[weakref.WeakMethod[Callable[[], None]]] = set()


def in_children(renew: Callable[[], None]) -> None:
    """Have a method called in every forked child, as long as its object lives. It must raise nothing."""
    _renewals.add(weakref.WeakMethod(renew, _renewals.discard))


def _after_fork_in_child() -> None:
    for each in list(_renewals):
        renew = each()
        if renew is not None:
            renew()


os.register_at_fork(after_in_child=_after_fork_in_child)
