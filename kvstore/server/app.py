"""The server's life: settings in, doors open, signal, doors closed."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore import __version__
from kvstore.arena import Arena, prefault
from kvstore.config import LoadedSettings
from kvstore.controller import Controller
from kvstore.errors import KVStoreError, Unavailable
from kvstore.policy import LeastRecentlyUsed
from kvstore.seams import (
    FaultPoints,
    SystemClock,
    SystemDisk,
    SystemMemory,
    SystemRandom,
    TenantKeys,
    WorkerThreads,
)
from kvstore.seams.scheduler import MOVER_NICE
from kvstore.server.device import open_nvme
from kvstore.server.handoff import Handoff
from kvstore.server.metrics import start_metrics
from kvstore.server.publishing import open_publisher
from kvstore.server.remote import RemoteDoor
from kvstore.server.rpc import register
from kvstore.server.services import AdminService, CacheService
from kvstore.server.state import DATA_SOCKET, GRPC_SOCKET, claim_socket, listen, prepare
from kvstore.telemetry import Counters, configure_logging
from kvstore.tiers import TierStatistics
from kvstore.tiers.nvme import FutureFormat
from kvstore.units import format_bytes
from kvstore.v1 import cache_pb2
from kvstore.v1alpha import admin_pb2

MOVER_COUNT = 2
EPOCH_BYTES = 8
SWITCH_INTERVAL_S = 0.0005
"""How long a byte mover may hold the interpreter while the event loop waits."""
PR_SET_DUMPABLE = 4
_log = logging.getLogger("kvstore.server")


def serve(loaded: LoadedSettings) -> int:
    """Run the service until SIGTERM or SIGINT. Returns the exit status.

    Raises: KVStoreError when it cannot start; the message names the setting and the remedy.
    """
    settings = loaded.settings
    configure_logging(settings.server.log_level, settings.server.log_format)
    os.umask(0o077)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    disk = SystemDisk()
    lock = prepare(settings.server, disk)
    try:
        asyncio.run(_run(loaded, disk))
    except* KVStoreError as group:
        raise group.exceptions[0] from group
    finally:
        disk.close(lock)
    return 0


async def _run(loaded: LoadedSettings, disk: SystemDisk) -> None:
    settings = loaded.settings
    clock = SystemClock()
    workers = WorkerThreads(MOVER_COUNT, "mover", nice=MOVER_NICE)
    background = WorkerThreads(1, "prefault", nice=19)
    faults = _faults()
    controller = _controller(loaded, clock, workers, faults)
    arena = controller.arena
    sockets = settings.server.socket_directory
    stopping, loop = _told_to_stop(), asyncio.get_running_loop()
    for name in (GRPC_SOCKET, DATA_SOCKET):
        claim_socket(sockets / name, disk)
    publisher = open_publisher(settings.events, controller, clock)
    page = start_metrics(loaded, controller, loop)
    server, health_service = _grpc_server(controller, clock, loaded)
    door = RemoteDoor(settings, clock)
    try:
        async with asyncio.TaskGroup() as group:
            listener = listen(sockets / DATA_SOCKET)
            tasks = [group.create_task(Handoff(controller, clock).serve(listener, group))]
            if server.add_insecure_port(f"unix:{sockets / GRPC_SOCKET}") == 0:
                raise Unavailable(f"cannot listen on {sockets / GRPC_SOCKET}")
            await _attach(controller, loaded, disk, clock, faults, workers)
            await server.start()
            await _report_healthy(health_service)
            os.chmod(sockets / GRPC_SOCKET, 0o600)
            await door.start()
            besides = [controller.run(), door.watch()]
            besides += [publisher.run()] if publisher is not None else []
            besides += [prefault(arena, background, clock)] if settings.arena.prefault else []
            tasks += [group.create_task(each) for each in besides]
            _announce(loaded, page, controller.stats().nvme, door.address)
            await stopping.wait()
            _log.info("stopping")
            await door.stop()
            await health_service.enter_graceful_shutdown()
            await controller.drain(settings.server.shutdown_grace_s)
            await server.stop(1.0)
            listener.close()
            for task in tasks:
                task.cancel()
            # What waits for the device ends when the device lets it go, and that may be never.
            await asyncio.wait(tasks, timeout=max(1.0, settings.server.shutdown_grace_s))
            if not all(task.done() for task in tasks):
                _leave_now(sockets, disk)
            for session in controller.sessions:
                await controller.close_session(session)
            await controller.detach()
            raise _Stopped
    except* _Stopped:
        pass
    finally:
        await door.stop()
        await server.stop(None)
        for name in (GRPC_SOCKET, DATA_SOCKET):
            disk.remove(sockets / name)
        for each in (workers, background, publisher, arena):
            if each is not None:
                each.close()


def _told_to_stop() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


def _controller(loaded: LoadedSettings, clock: SystemClock, workers: WorkerThreads, faults: FaultPoints) -> Controller:
    """The service on the real world."""
    settings, memory = loaded.settings, SystemMemory()
    arena = Arena(
        memory, faults, capacity_bytes=settings.arena.capacity_bytes, region_bytes=settings.arena.region_bytes
    )
    return Controller(
        arena=arena,
        policy=LeastRecentlyUsed(),
        limits=settings.limits,
        clock=clock,
        random=SystemRandom(),
        memory=memory,
        workers=workers,
        keys=TenantKeys(),
        faults=faults,
        counters=Counters(),
        deadline_s=settings.controller.deadline_s,
        policies=settings.policy,
        is_write_through=settings.tiers.nvme.write == "through",
    )


async def _attach(
    controller: Controller,
    loaded: LoadedSettings,
    disk: SystemDisk,
    clock: SystemClock,
    faults: FaultPoints,
    workers: WorkerThreads,
) -> None:
    """Open the device tier. A directory of a newer release stops the start; anything else that is wrong with it is
    said, and the service runs without."""
    settings = loaded.settings.tiers.nvme
    if not settings.capacity_bytes:
        return
    try:
        await controller.attach(open_nvme(settings, disk, clock, faults, workers))
    except FutureFormat:
        raise
    except (KVStoreError, OSError) as error:
        reason = error.message if isinstance(error, KVStoreError) else f"{settings.directory}: {error.strerror}"
        controller.nvme_reason = f"the NVMe tier is off: {reason} (tiers.nvme.directory)"
        _log.error(controller.nvme_reason)


def _faults() -> FaultPoints:
    """``KVSTORE_CRASH=point:n`` kills this process the n-th time it reaches a fault point: how the crash tests test."""
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


def _leave_now(sockets: Path, disk: SystemDisk) -> None:
    """The device answers nobody, and a thread that waits for it cannot be ended: end the process as a crash would,
    which costs the next start a look at the headers."""
    _log.error("the device does not answer: leaving without its snapshot")
    for name in (GRPC_SOCKET, DATA_SOCKET):
        disk.remove(sockets / name)
    logging.shutdown()
    os._exit(0)


class _Stopped(Exception):
    """The service was told to stop."""


def _grpc_server(controller: Controller, clock: SystemClock, loaded: LoadedSettings) -> tuple[Any, Any]:
    limit = loaded.settings.limits.message_bytes_max
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", limit), ("grpc.so_reuseport", 0)],
    )
    cache = cache_pb2.DESCRIPTOR.services_by_name["CacheService"]
    admin = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
    register(server, cache, CacheService(controller, SystemRandom().bytes(EPOCH_BYTES)), controller.counters)
    register(server, admin, AdminService(controller, clock, os.getpid()), controller.counters)
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection(
        (cache.full_name, admin.full_name, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
         reflection.SERVICE_NAME), server,
    )  # fmt: skip
    return server, health_service


async def _report_healthy(health_service: Any) -> None:
    for module in (cache_pb2, admin_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            await health_service.set(service.full_name, health_pb2.HealthCheckResponse.SERVING)


def _announce(loaded: LoadedSettings, page: str, nvme: TierStatistics | None, remote: str) -> None:
    settings = loaded.settings
    path = settings.server.socket_directory / GRPC_SOCKET
    tiers = f"arena {format_bytes(settings.arena.capacity_bytes)}"
    if nvme is not None:
        tiers += f", nvme {format_bytes(nvme.capacity_bytes)} with {nvme.chunk_count:,} chunks"
    if remote:
        tiers += f", remote {remote}"
    print(f"kvstore {__version__} ready on unix://{path} (pid {os.getpid()}, {tiers}, {page})", flush=True)
    _log.info("ready", extra={"socket": str(path), "pid": os.getpid(), "metrics": page})
