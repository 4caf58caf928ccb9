"""The limits of control groups, as a unit of systemd, a container and an old kernel have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.seams.cgroup import GroupMemory, group_memory


def group(root: Path, path: str, limit: str, *, version: int = 2) -> None:
    """Make a group that uses 5 bytes."""
    limited, used = ("memory.max", "memory.current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    place = root / path if version == 2 else root / "memory" / path
    prefix = "" if version == 2 else "memory."
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{prefix}{limited}").write_text(f"{limit}\n")
    (place / f"{prefix}{used}").write_text("5\n")


@pytest.mark.parametrize(
    ("own", "groups", "version", "limits"),
    [
        ("0::/system.slice/kvstore.service", {"system.slice/kvstore.service": "100"}, 2, {100}),
        ("0::/a/b", {"a/b": "max", "a": "70"}, 2, {70}),  # the slice around the unit has one
        ("0::/", {"": "60"}, 2, {60}),  # a container with a namespace of its own
        ("0::/docker/1", {"": "60"}, 2, {60}),  # and without one
        ("0::/../../other", {"": "60", "../../other": "9"}, 2, {60}),
        ("3:cpu,memory:/a:b", {"a:b": "50", "": "90"}, 1, {50, 90}),
        ("3:cpu:/a", {"a": "50"}, 1, set()),
        ("0::/a", {"a": "max"}, 2, set()),
        ("", {}, 2, set()),
    ],
)
def test_every_group_around_the_process_limits_it(
    tmp_path: Path, own: str, groups: dict[str, str], version: int, limits: set[int]
) -> None:
    root, membership = tmp_path / "one" / "two" / "cgroup", tmp_path / "membership"
    root.mkdir(parents=True)
    membership.write_text(own)
    for path, limit in groups.items():
        group(root, path, limit, version=version)
    assert set(group_memory(root, membership)) == {GroupMemory(limit, 5) for limit in limits}
    assert group_memory(tmp_path / "nowhere", tmp_path / "nothing") == []
