"""The life of the server process: it reads the settings, serves all tenants until a signal, and stops cleanly."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from contextlib import AsyncExitStack, ExitStack, closing
from functools import partial

from kvstore import __version__
from kvstore.config import LoadedSettings, Settings
from kvstore.config.machine import check_arena
from kvstore.errors import KVStoreError
from kvstore.seams import (
    FaultPoints,
    MoverProcesses,
    SystemClock,
    SystemDisk,
    SystemMemory,
    SystemRandom,
    TenantKeys,
    WorkerThreads,
)
from kvstore.seams.scheduler import MOVER_NICE
from kvstore.server.descriptors import check_needs, raise_limit
from kvstore.server.publishing import open_publisher
from kvstore.server.reloading import Reloading
from kvstore.server.remote import RemoteDoor
from kvstore.server.secrets import read_keys
from kvstore.server.state import close_again, prepare
from kvstore.server.tenant import Tenant
from kvstore.server.tiers import TIERS, Tiers
from kvstore.server.trust import Rings
from kvstore.server.web.facts import Overview
from kvstore.server.web.site import Site, start_web
from kvstore.server.world import World
from kvstore.telemetry import NO_TRACING, Tracing, configure_logging, drop_output, log_as
from kvstore.units import format_bytes

MOVERS_MIN, MOVERS_MAX = 2, 8
PROCESSORS_PER_MOVER = 4
"""A mover copies and checks some 3.5 GB/s: two keep up with what two processors bring, and a GPU brings far more."""
SWITCH_INTERVAL_S = 0.0005
"""Seconds that another thread may hold the interpreter while the event loop waits."""
DETACH_TIMEOUT_S = 30.0
ENDING_TIMEOUT_S = 1.0
"""Seconds that tasks may take to end once the tiers that they waited for are closed."""
PR_SET_DUMPABLE = 4
_log = logging.getLogger("kvstore.server")


def serve(loaded: LoadedSettings, tiers: Tiers = TIERS) -> int:
    """Run the service until SIGTERM or SIGINT. Return the exit status. ``tiers``: builders of each tenant's tiers below
    memory.

    Raises KVStoreError when it cannot start; the message names the setting and the remedy.
    """
    settings = loaded.settings
    configure_logging(settings.server.log_level, settings.server.log_format)
    os.umask(0o077)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    disk = SystemDisk()
    limit = raise_limit()
    check_arena(settings.arena.capacity_bytes)
    check_needs({name: loaded.of_tenant(name) for name in settings.tenant_names}, limit, tiers.needs)
    try:
        with ExitStack() as ends:
            lock = prepare(settings, disk)
            ends.callback(disk.close, lock)
            ends.callback(close_again, settings)
            movers = MoverProcesses(mover_count(len(os.sched_getaffinity(0))))  # before there are secrets, or threads
            ends.callback(movers.close)
            movers.lend(lock)  # no other server takes this state directory while a mover still writes for this one
            keys = read_keys(settings.tenants)
            asyncio.run(_run(loaded, keys, Rings(keys, settings.tenants), disk, movers, limit, tiers))
    except* KVStoreError as group:
        raise group.exceptions[0] from group
    return 0


async def _run(
    loaded: LoadedSettings, keys: dict[str, TenantKeys], rings: Rings, disk: SystemDisk, movers: MoverProcesses,
    limit: int, tiers: Tiers,
) -> None:  # fmt: skip
    settings, clock = loaded.settings, SystemClock()
    stopping, loop = _told_to_stop(), asyncio.get_running_loop()  # first: asyncio would cancel what is half made
    async with AsyncExitStack() as ends:
        world = _world(loaded, disk, movers, limit, tiers, ends)
        tenants = [
            Tenant(loaded.of_tenant(name), keys[name], rings[name], world, tiers) for name in settings.tenant_names
        ]
        rings.follow()
        for tenant in tenants:
            tenant.claim()
            ends.push_async_callback(tenant.abandon)
        movers.watch(partial(_leave_now, tenants, "a byte mover ended: leaving, as after a crash", 1))
        publisher = open_publisher(settings.events, tenants[0].controller, clock)
        if publisher is not None:
            ends.callback(publisher.close)
        controllers = {tenant.name: tenant.controller for tenant in tenants}
        watched = ((tenant.controller, tenant.operators, tenant.prefills) for tenant in tenants)
        has_token = bool(settings.server.metrics_token_file)
        overview = Overview(watched, clock, shows_digests=has_token)
        site = Site(controllers, overview, loop, clock, shows_tenants=has_token or len(tenants) == 1)
        page = start_web(loaded, site)
        door = RemoteDoor(settings, {tenant.name: tenant.settings for tenant in tenants}, clock)
        ends.push_async_callback(door.stop)
        world.reloading.pass_on(door.set_log_level)
        try:
            async with asyncio.TaskGroup() as group:
                opening = group.create_task(_open(tenants, door, group))
                told = group.create_task(stopping.wait())
                await asyncio.wait((opening, told), return_when=asyncio.FIRST_COMPLETED)
                if not opening.done():  # the headers of a large device take minutes, and one that stalls takes for ever
                    _leave_now(tenants, "told to stop before the start was over: leaving, as after a crash", 0)
                besides = [group.create_task(door.watch()), group.create_task(overview.run())]
                if publisher is not None:
                    with log_as(tenants[0].said):
                        besides.append(group.create_task(publisher.run()))
                gc.freeze()  # permanent objects are not collected again: that takes 30 ms each time
                _announce(tenants, page, door.address)
                site.is_ready = True
                await told
                site.is_ready = False
                _log.info("stopping")
                await door.stop()
                await _stop(tenants, besides, settings.server.shutdown_grace_s)
                raise _Stopped
        except* _Stopped:
            pass


def _world(
    loaded: LoadedSettings, disk: SystemDisk, movers: MoverProcesses, limit: int, tiers: Tiers, ends: AsyncExitStack
) -> World:  # fmt: skip
    """Return the world of all tenants. ``ends`` closes its lanes, its threads and the receiver of spans."""
    return World(
        clock=SystemClock(), random=SystemRandom(), memory=SystemMemory(movers), disk=disk, faults=_faults(),
        tracing=ends.enter_context(closing(_tracing(loaded.settings))),
        workers=ends.enter_context(closing(movers.lane("mover", len(movers.pids), nice=MOVER_NICE))),
        prefaulting=ends.enter_context(closing(WorkerThreads(1, "prefault", nice=MOVER_NICE))),
        movers=movers, descriptor_limit=limit,
        reloading=Reloading(loaded, partial(check_needs, limit=limit, of_tiers=tiers.needs)),
    )  # fmt: skip


def mover_count(processors: int) -> int:
    """Return the number of byte movers for so many processors."""
    return max(MOVERS_MIN, min(MOVERS_MAX, processors // PROCESSORS_PER_MOVER))


async def _open(tenants: list[Tenant], door: RemoteDoor, group: asyncio.TaskGroup) -> None:
    """Serve all tenants, then clients on other hosts. Background work runs as tasks of ``group``. Where one cannot be
    served, those before it are stopped cleanly: the start took their devices' snapshots away."""
    opened: list[Tenant] = []
    try:
        for tenant in tenants:
            await tenant.open(group)
            opened.append(tenant)
        await door.start()
    except Exception:
        if opened:
            await _stop(opened, [], 0.0, status=1)
        raise


async def _stop(
    tenants: list[Tenant], besides: list[asyncio.Task[None]], grace_s: float, status: int = 0
) -> None:  # fmt: skip
    """Stop all tenants cleanly, all at once. Raises the first tenant's error after all have ended. ``status``: with
    which the process ends where they cannot be stopped."""
    ends = await asyncio.gather(*(tenant.close_doors(grace_s) for tenant in tenants), return_exceptions=True)
    for task in besides:
        task.cancel()
    tasks = [*besides, *(task for tenant in tenants for task in tenant.tasks)]
    # Tasks that wait for a device end only when it answers, and that may be never.
    await asyncio.wait(tasks, timeout=max(1.0, grace_s))
    if not all(task.done() for task in tasks):
        if any(tenant.is_device_asked for tenant in tenants):
            _leave_now(tenants, "the device does not answer: leaving without its snapshot", status)
        _log.warning("shared tiers have not answered: what was on its way there, or from there, is given up")
    detached = asyncio.gather(*(tenant.detach() for tenant in tenants), return_exceptions=True)
    await asyncio.wait([detached], timeout=DETACH_TIMEOUT_S)
    if not detached.done():  # a device stalled only now; the other tenants have their snapshots
        _leave_now(tenants, "the device does not answer: leaving without its snapshot", status)
    await asyncio.wait(tasks, timeout=ENDING_TIMEOUT_S)
    if not all(task.done() for task in tasks):  # the devices have their snapshots
        _leave_now(tenants, "work did not end, although all tiers are closed: leaving without it", status)
    for end in [*ends, *detached.result()]:
        if end is not None:
            raise end


def _told_to_stop() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


def _tracing(settings: Settings) -> Tracing:
    """Return the receiver of spans. Raises InvalidRequest where the settings ask for spans and they cannot be made."""
    if not settings.tracing.endpoint:
        return NO_TRACING
    from kvstore.telemetry.spans import open_spans  # its packages are installed only where spans are wanted

    return open_spans(settings.tracing, settings.server.node)


def _faults() -> FaultPoints:
    """Return the fault points. For crash tests, ``KVSTORE_CRASH=point:n`` kills this process the n-th time that it
    reaches a point."""
    faults = FaultPoints()
    point, _, count = os.environ.get("KVSTORE_CRASH", "").partition(":")
    if point:
        remaining = int(count or 1)

        def reach() -> None:
            nonlocal remaining
            remaining -= 1
            if remaining <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

        faults.arm(point, reach)
    return faults


def _leave_now(tenants: list[Tenant], reason: str, status: int) -> None:
    """End the process as a crash would, because some work cannot be finished. The next start then reads the headers of
    stored chunks."""
    _log.error(reason)
    for tenant in tenants:
        tenant.sockets.remove()
    logging.shutdown()
    os._exit(status)


class _Stopped(Exception):
    """The service was told to stop."""


def _announce(tenants: list[Tenant], page: str, remote: str) -> None:
    first, *others = tenants
    path = first.sockets.grpc
    tiers = f"arena {format_bytes(first.settings.arena.capacity_bytes)}"
    for tier in first.controller.stats().tiers:
        room = f" {format_bytes(tier.capacity_bytes)}" if tier.capacity_bytes else ""
        tiers += f", {tier.name}{room}{'' if tier.is_shared else f' with {tier.chunk_count:,} chunks'}"
    if remote:
        tiers += f", remote {remote}"
    if others:
        tiers += f", tenants {' '.join(tenant.name for tenant in others)}"
    try:
        print(f"kvstore {__version__} ready on unix://{path} (pid {os.getpid()}, {tiers}, {page})", flush=True)
    except OSError as error:  # its reader has gone, or its disk is full: no reason not to serve
        _log.warning("standard output cannot be written", extra={"reason": str(error)})
        drop_output()
    for tenant in tenants:
        with log_as(tenant.said):
            _log.info("ready", extra={"socket": str(tenant.sockets.grpc), "pid": os.getpid(), "metrics": page})
    _warn_of_shared_users(tenants)


def _warn_of_shared_users(tenants: list[Tenant]) -> None:
    """Warn where several tenants have no user of their own: their sockets do not protect them from each other."""
    own = os.geteuid()
    names = [tenant.name for tenant in tenants if tenant.uid in (None, own)]
    if len(names) > 1:
        _log.warning(
            "these tenants are all served to the server's own user, whose processes may open the sockets of each: give "
            "each a user with tenants.NAME.uid, or let its clients come over TCP with tokens",
            extra={"tenants": names, "uid": own},
        )
