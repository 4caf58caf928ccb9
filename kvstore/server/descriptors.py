"""Open files: the process's limit, the number that the settings need, and the setting that asks for too many."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvstore.config import DEFAULT_TENANT, OPERATOR_SESSION_COUNT, Settings
from kvstore.errors import InvalidRequest

OWN_COUNT = 192
"""The process's own open files: movers, lanes, event loop, gRPC, logs, metrics and the connections that read them."""
LISTENER_OWN_COUNT = 128
"""The same of the process that serves other hosts, with the descriptors of a hand-off's packet."""
SOFT_LIMIT_MAX = 1 << 20
"""Enough for any settings. With a hard limit of "infinity" no larger limit is set: some programs walk all possible
descriptors."""
HELLO_COUNT_MAX = 32
"""Connections to a tenant's hand-off that have no session yet, or no longer."""


class Need(NamedTuple):
    """``files``: number of open files that follow from a setting."""

    files: int
    setting: str
    value: object
    remedy: str


def raise_limit() -> int:
    """Raise the soft limit on open files as far as this user may, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SOFT_LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, SOFT_LIMIT_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return SOFT_LIMIT_MAX if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def needs(settings: Settings) -> list[Need]:
    """Return the open files that one tenant may need beside those of its tiers. ``settings``: the tenant's own view."""
    arena, limits = settings.arena, settings.limits
    regions = -(-arena.capacity_bytes // arena.region_bytes) + 2
    return [
        Need(regions, "arena.region_bytes", arena.region_bytes, "one for each region of the arena: raise it"),
        Need(limits.session_count_max + OPERATOR_SESSION_COUNT, "limits.session_count_max", limits.session_count_max,
             "one each: lower it"),
        Need(limits.staging_count_total_max, "limits.staging_count_total_max", limits.staging_count_total_max,
             "one each: lower it"),
        Need(limits.connection_count_max + HELLO_COUNT_MAX, "limits.connection_count_max", limits.connection_count_max,
             "one each: lower it"),
    ]  # fmt: skip


def check_needs(tenants: Mapping[str, Settings], limit: int, of_tiers: Callable[[Settings], list[Need]]) -> None:
    """Check that the needs of all tenants and of their tiers fit the limit, and those of the process that serves other
    hosts. Raises InvalidRequest naming the setting that asks for the most files."""
    every = [(need, name) for name, each in tenants.items() for need in (*needs(each), *of_tiers(each))]
    _check(every, OWN_COUNT, limit)
    check_listener(tenants, limit)


def check_listener(tenants: Mapping[str, Settings], limit: int) -> None:
    """Check that the connections from other hosts and the sessions on them fit the limit of the process that has them:
    past it, strangers' connections would take the files that clients' stores need. Raises as ``check_needs``."""
    served = {name: each for name, each in tenants.items() if each.remote.address and each.remote.token_file}
    every: list[tuple[Need, str]] = []
    for name, each in served.items():
        count = each.limits.session_count_max
        every.append((Need(count, "limits.session_count_max", count, "one each: lower it"), name))
    if served:
        count = next(iter(served.values())).remote.connection_count_max
        every.append((Need(count, "remote.connection_count_max", count, "one each: lower it"), DEFAULT_TENANT))
        _check(every, LISTENER_OWN_COUNT, limit)


def _check(every: Sequence[tuple[Need, str]], own_count: int, limit: int) -> None:
    """``every``: the needs of a process, and whose they are; ``own_count``: the files that it has without them."""
    total = own_count + sum(need.files for need, _ in every)
    if total <= limit:
        return
    most, name = max(every, key=lambda found: found[0].files)
    whose = "" if name == DEFAULT_TENANT else f" for tenant {name}"
    raise InvalidRequest(
        f"{most.setting} = {most.value} takes {most.files} open files{whose} ({most.remedy}), all settings together "
        f"{total}, and this user may open {limit}: change it, or raise the hard limit (ulimit -Hn, LimitNOFILE= of "
        "systemd)",
        setting=most.setting,
    )
