"""Finds the compiled code."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec


@cache
def compiled_code() -> ctypes.CDLL | None:
    """Return the compiled code, whose calls let other threads run; None where there is none, or
    ``KVSTORE_COPIES=plain`` is set."""
    found = find_spec("kvstore_copies._compiled")
    if found is None or found.origin is None or os.environ.get("KVSTORE_COPIES") == "plain":
        return None
    try:
        return ctypes.CDLL(found.origin)
    except OSError:  # built for another machine
        return None
