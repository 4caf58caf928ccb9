"""What a process has open."""

from __future__ import annotations

import os


def open_files(process: int | str = "self") -> list[str]:
    """The names of its files. Others of its threads open and close some meanwhile."""
    names: list[str] = []
    for number in os.listdir(f"/proc/{process}/fd"):
        try:
            names.append(os.readlink(f"/proc/{process}/fd/{number}"))
        except FileNotFoundError:
            continue
    return names
