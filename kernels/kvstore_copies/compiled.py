"""Finds the compiled code."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec


@cache
def compiled_path() -> str | None:
    """Return the file of the compiled code; None where there is none, or ``KVSTORE_COPIES=plain`` is set."""
    found = find_spec("kvstore_copies._compiled")
    return None if found is None or os.environ.get("KVSTORE_COPIES") == "plain" else found.origin


@cache
def compiled_code() -> ctypes.CDLL | None:
    """Return the compiled code, whose calls let other threads run; None where there is none."""
    path = compiled_path()
    if path is None:
        return None
    try:
        return ctypes.CDLL(path)
    except OSError:  # built for another machine
        return None
