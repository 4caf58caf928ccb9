"""Open files: how many this process may have, what it will need, and which setting asks for more than there are."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import NamedTuple

from kvstore.config import DEFAULT_TENANT, Settings
from kvstore.errors import InvalidRequest

OWN_COUNT = 128
"""The process's own: movers, lanes, the event loop's, gRPC's, logs, metrics and those that read them."""
SOFT_LIMIT_MAX = 1 << 20
"""Enough for any settings; where the hard limit is "infinity" a table of that size would be walked by somebody."""
HELLO_COUNT_MAX = 32
"""Connections to a tenant's hand-off that have no session: not yet, or no longer."""
REGION_FILES_BESIDES = 32
"""Region files double in size until they have their own, for each size of chunks. Then a file holds whole chunks, which
may fill half of it."""


class Need(NamedTuple):
    """``files``: how many open files follow from a setting."""

    files: int
    setting: str
    value: object
    remedy: str


def raise_limit() -> int:
    """The soft limit on open files as far up as this user may. Returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SOFT_LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, SOFT_LIMIT_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return SOFT_LIMIT_MAX if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def needs(settings: Settings, name: str) -> list[Need]:
    """What one tenant may come to need. ``settings``: the tree as it sees it."""
    arena, nvme, limits = settings.arena, settings.tiers.nvme, settings.limits
    whose = "" if name == DEFAULT_TENANT else f" of tenant {name}"
    regions = -(-arena.capacity_bytes // arena.region_bytes) + 2
    found = [
        Need(regions, "arena.region_bytes", arena.region_bytes, f"one for each region of the arena{whose}: raise it"),
        Need(limits.session_count_max, "limits.session_count_max", limits.session_count_max, "one each: lower it"),
        Need(limits.staging_count_total_max, "limits.staging_count_total_max", limits.staging_count_total_max,
             "one each: lower it"),
        Need(limits.connection_count_max + HELLO_COUNT_MAX, "limits.connection_count_max", limits.connection_count_max,
             "one each: lower it"),
    ]  # fmt: skip
    if nvme.capacity_bytes:
        there = len(list(nvme.directory.glob("region-*.kvs")))
        files = max(2 * -(-nvme.capacity_bytes // nvme.region_bytes), there) + REGION_FILES_BESIDES
        remedy = f"one for each region file{whose}: raise it"
        found.append(Need(files, "tiers.nvme.region_bytes", nvme.region_bytes, remedy))
    return found


def check_needs(tenants: Mapping[str, Settings], limit: int) -> None:
    """Whether all tenants' needs fit the limit. Raises InvalidRequest naming the setting that asks for the most."""
    every = [need for name, settings in tenants.items() for need in needs(settings, name)]
    total = OWN_COUNT + sum(need.files for need in every)
    if total <= limit:
        return
    most = max(every, key=lambda need: need.files)
    raise InvalidRequest(
        f"{most.setting} = {most.value} takes {most.files} open files ({most.remedy}), all settings together {total}, "
        f"and this user may open {limit}: change it, or raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd)",
        setting=most.setting,
    )
