"""The origin of a benchmark's figures: the code and the machine, without which figures mean nothing."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvstore.units import format_bytes

ROOT = Path(__file__).resolve().parents[3]


def origin(scale: str) -> dict[str, Any]:
    """Return the commit ("+" behind it: with changes), day, scale, machine, and the number of processes that wanted a
    core before. Where the code lies without its history, ``KVSTORE_COMMIT`` names the commit."""
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "scale": scale,
        "machine": machine(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def _commit() -> str:
    named = os.environ.get("KVSTORE_COMMIT", "")
    return named or (_git("rev-parse", "--short=7", "HEAD") or "unknown") + (
        "+" if _git("status", "--porcelain") else ""
    )


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # there is no git
        return ""


def machine() -> str:
    """Return the machine's processors and memory."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    memory = format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return f"{os.cpu_count()} cores ({model}), {memory} of memory"
