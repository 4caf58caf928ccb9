"""The memory of this process's control groups. A group's limit holds for all groups in it, so the groups around our own
count, too."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class GroupMemory(NamedTuple):
    """One group's memory."""

    limit_bytes: int
    used_bytes: int


def group_memory(root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[GroupMemory]:
    """Return the memory of each group that has a limit (of version 2 or 1); none where they cannot be read."""
    found: dict[Path, GroupMemory] = {}
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in ["0::/", "0:memory:/", *lines]:  # in a container our own group may be shown as the root
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for group in (own := PurePosixPath(path.lstrip("/")), *own.parents):
            if ".." not in group.parts:  # a group beyond what this process is shown
                _add(found, base / group, limit, used)
    return list(found.values())


def _add(found: dict[Path, GroupMemory], group: Path, limit: str, used: str) -> None:
    try:
        most, now = ((group / name).read_text(encoding="ascii").strip() for name in (limit, used))
    except OSError:
        return
    if most.isdigit():
        found[group] = GroupMemory(int(most), int(now))
