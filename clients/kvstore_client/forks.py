"""Renews threads and locks in a forked child. This happens at the fork, while the child has one thread, so no later
call can find them stale."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from types import MethodType
from typing import cast

_renewals: weakref.WeakKeyDictionary[object, Callable[..., None]] = weakref.WeakKeyDictionary()


def in_children(renew: Callable[[], None]) -> None:
    """Call a method in every forked child, as long as its object lives. The method must not raise."""
    method = cast(MethodType, renew)
    _renewals[method.__self__] = method.__func__


def _after_fork_in_child() -> None:
    for owner, renew in list(_renewals.items()):
        renew(owner)


os.register_at_fork(after_in_child=_after_fork_in_child)
