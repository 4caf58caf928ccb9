"""Defaults that depend on the machine or on other settings."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from kvstore.units import GIB, PAGE_BYTES


def _host_name() -> str:
    """Return the host's name, with characters replaced that a node's name may not have."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", socket.gethostname())[:128] or "localhost"


def derived_defaults(environment: Mapping[str, str], memory_bytes: int) -> dict[str, dict[str, object]]:
    """Defaults that depend on the machine: directories, and an arena of min(25 % of memory, 4 GiB)."""
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    state_home = environment.get("XDG_STATE_HOME")
    state = (Path(state_home) if state_home else home / ".local" / "state") / "kvstore"
    capacity = min(memory_bytes // 4, 4 * GIB) // PAGE_BYTES * PAGE_BYTES
    return {
        "server": {"state_directory": state, "node": _host_name()},
        "arena": {"capacity_bytes": max(capacity, 2 * PAGE_BYTES)},
    }


def dependent_defaults(
    environment: Mapping[str, str], state_directory: Path, capacity_bytes: int
) -> dict[str, dict[str, object]]:
    """Defaults that follow from other settings."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    sockets = Path(runtime) / "kvstore" if runtime else state_directory / "run"
    return {
        "server": {"socket_directory": sockets},
        "tiers.nvme": {"directory": state_directory / "nvme"},
        "limits": dict(arena_limits(capacity_bytes)),
    }


def arena_limits(capacity_bytes: int) -> dict[str, int]:
    """Return the limits that follow from an arena's size."""
    return {
        "leased_bytes_max": capacity_bytes,
        "pin_bytes_max": capacity_bytes // 2,
        "ticket_bytes_max": capacity_bytes // 2,
    }


def device_defaults(room_bytes: int, kept_bytes: int) -> dict[str, dict[str, object]]:
    """Return the default capacity of the device tier: its last capacity, or at the first start min(10 % of the room
    that its directory's file system has for us, 16 GiB)."""
    first_bytes = min(room_bytes // 10, 16 * GIB) // PAGE_BYTES * PAGE_BYTES
    return {"tiers.nvme": {"capacity_bytes": kept_bytes or first_bytes}}
