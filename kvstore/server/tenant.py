"""One tenant of the process: its controller and arena, the doors in front of them, and the tiers behind them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvstore.arena import Arena, prefault
from kvstore.config import DEFAULT_TENANT, Settings
from kvstore.controller import Controller, Parts
from kvstore.controller.operators import Operators
from kvstore.controller.prefills import PartialPrefills
from kvstore.directory import NodeDirectory
from kvstore.errors import KVStoreError, Unavailable
from kvstore.policy import POLICIES
from kvstore.seams import EnvelopeRing, TenantKeys
from kvstore.seams.jobs import in_time
from kvstore.seams.scheduler import run_for, start_thread
from kvstore.server.announcing import Announcer
from kvstore.server.handoff import Handoff
from kvstore.server.kept import kept_files, later_files
from kvstore.server.operators import AdminService
from kvstore.server.outbox import IN_FLIGHT_SHARE, Outbox
from kvstore.server.places import CallPlaces, CountedHealth, CountedReflection
from kvstore.server.prefills import PrefillService
from kvstore.server.rpc import register
from kvstore.server.services import CacheService
from kvstore.server.state import SocketDirectory, no_socket
from kvstore.server.tiers import Builder, Tiers
from kvstore.server.trust import envelope_of
from kvstore.server.warming import Warming
from kvstore.server.world import TierOwner, World
from kvstore.telemetry import Counters, log_as
from kvstore.tiers import NotOurs
from kvstore.tiers.hbm import HbmTier, Pool
from kvstore.v1 import cache_pb2
from kvstore.v1alpha import admin_pb2, prefill_pb2
from kvstore.wire.limits import REPLY_BYTES_MAX

EPOCH_BYTES = 8
HANDSHAKE_TIMEOUT_MS = 5000
"""Milliseconds that a connection may hold one of the server's descriptors before its HTTP/2 handshake is done."""
HBM_OPENING_S_MAX = 30.0
"""Seconds that a device's driver may take until there is a pool: on a machine of many GPUs it takes ten."""
OVER_COUNT = 64
"""Calls beyond their places that the service refuses by itself, naming the limit; gRPC refuses those beyond without."""
_log = logging.getLogger("kvstore.server")


class Tenant:
    """One tenant. ``settings``: the tenant's own view of the settings; ``tiers``: builders of its tiers below memory.
    Call in order ``claim``, ``open``, ``close_doors``, ``detach``; at the end, and after a failure, ``abandon``."""

    def __init__(
        self, settings: Settings, keys: TenantKeys, ring: EnvelopeRing, world: World, tiers: Tiers
    ) -> None:  # fmt: skip
        self.name = keys.tenant
        self.settings = settings
        self.said = self.name if settings.tenants else ""
        """Its name in logs; empty where it is the only tenant."""
        own = settings.tenants.get(self.name)
        self.uid = own.uid if own is not None else None
        self._world = world
        world.reloading.follow(self.name, settings)
        self._tiers = tiers
        self._owner = TierOwner(_owner(keys), ring)
        directory = tiers.directory(settings, world, self._owner.name)
        self._parts = _parts(settings, keys, world, directory)
        self.controller = Controller(self._parts)
        self.sockets = SocketDirectory(
            settings.server.socket_directory, world.disk, tenant=self.name, uid=self.uid,
            is_own=self.name != DEFAULT_TENANT,
        )  # fmt: skip
        self._announcer: Announcer | None = None
        if directory is not None:
            self._announcer = Announcer(self.controller, directory, self._parts.movement.names.key, world.clock)
        self.operators = Operators(self._parts, self.controller)
        self._warming: Warming | None = None
        if directory is not None and settings.policy.warm_up_bytes:
            envelope = envelope_of(settings.tiers.redis.envelope, self._owner), ring
            self._warming = Warming(
                self._parts, self.controller, self.operators, directory, envelope, settings.policy.warm_up_bytes
            )
        self.prefills = PartialPrefills(self._parts, self.controller.lookups, self.controller.tickets)
        state = settings.server.state_directory
        self._kept = kept_files(state, world.disk, self._parts, self.prefills.engines)
        self._kept_later = later_files(state, world.disk, self._parts)
        self._server, self._health = _grpc_server(self.controller, self.operators, self.prefills, self._parts, world)
        self._listener: Any = None
        self.tasks: list[asyncio.Task[None]] = []

    def claim(self) -> None:
        """Claim the places of the tenant's sockets. Raises Unavailable when another server has one."""
        self.sockets.claim()

    async def open(self, group: asyncio.TaskGroup) -> None:
        """Open the doors, and return when the tenant is served. Background work runs as tasks of ``group``. Raises
        Unavailable."""
        with log_as(self.said):
            await self._attach_hbm()  # first: a session is told at its beginning whether there is a pool
            self._listener = self.sockets.listen()
            uids = {os.geteuid(), os.geteuid() if self.uid is None else self.uid}
            self._begin(group, self._handoff(uids).serve(self._listener, group))
            try:
                self._server.add_insecure_port(f"unix:{self.sockets.grpc}")
            except RuntimeError as error:
                raise no_socket(self.sockets.grpc, "gRPC cannot listen there") from error
            for kept in self._kept:
                kept.load()
            await self._attach()
            for kept in self._kept_later:
                kept.load()
            await self._server.start()
            await _report_healthy(self._health)
            self.sockets.give(self.sockets.grpc)
            self._begin(group, self.controller.run())
            for kept in (*self._kept, *self._kept_later):
                self._begin(group, kept.follow(self._world.clock, self._world.prefaulting))
            if self._announcer is not None:
                self._begin(group, self._announcer.run())
            if self._warming is not None:
                self._begin(group, self._warming.run())
            if self.settings.arena.prefault:
                world = self._world
                self._begin(group, prefault(self._parts.arena, world.prefaulting, world.clock))

    def _handoff(self, uids: set[int]) -> Handoff:
        share = int(self._world.descriptor_limit * IN_FLIGHT_SHARE) // len(self.settings.tenant_names)
        limits = self.settings.limits
        return Handoff(
            self.controller, self._world.clock, uids, outbox=Outbox(share), limits=limits, pool=self._pool
        )  # fmt: skip

    def _pool(self) -> Pool | None:
        """Return the pool on a device; None where there is none."""
        hbm = self._parts.movement.hbm
        return None if hbm is None else hbm.tier.pool

    def _begin(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(group.create_task(work))

    async def _attach(self) -> None:
        """Take the tiers below memory into use, the fastest first. A tier that a newer release or another tenant wrote
        stops the start; any other problem with a tier is logged, and the service runs without it."""
        owner = self._owner
        for builder in self._tiers.local:
            with _without(builder, self._parts.movement.absent):
                tier = builder.build(self.settings, self._world, owner)
                if tier is not None:
                    await self._parts.movement.attach(tier)
        for shared_builder in self._tiers.shared:
            with _without(shared_builder, self._parts.movement.absent):
                built = shared_builder.build(self.settings, self._world, owner)
                if built is not None:
                    self._parts.movement.attach_shared(built)

    async def _attach_hbm(self) -> None:
        """Take the pool on a device into use. Without it, the service runs as without any other tier."""
        builder = self._tiers.hbm
        if builder is None or not self.settings.tiers.hbm.capacity_bytes:
            return
        with _without(builder, self._parts.movement.absent):
            opening: Future[HbmTier | None] = Future()
            opened = partial(run_for, opening, builder.build, self.settings, self._world, self._owner)
            start_thread(opened, "hbm-opening")  # a driver that hangs holds up neither a stop nor the service
            try:
                hbm = await in_time(asyncio.wrap_future(opening), HBM_OPENING_S_MAX)
            except TimeoutError:
                opening.add_done_callback(_close_late)
                raise Unavailable(f"the device's driver did not answer within {HBM_OPENING_S_MAX:.0f} s") from None
            if hbm is not None:
                await self._parts.movement.attach_hbm(hbm)

    async def close_doors(self, grace_s: float) -> None:
        """Let stores in flight finish, at most ``grace_s`` seconds, then stop answering. Cancel the tasks, but do not
        wait for them: the caller bounds that wait."""
        with log_as(self.said):
            try:
                await self._health.enter_graceful_shutdown()
                await self.controller.drain(grace_s)
                await self._server.stop(1.0)
            finally:
                self._listener.close()
                for task in self.tasks:
                    task.cancel()

    @property
    def is_device_asked(self) -> bool:
        """See ``Movement.is_device_asked``."""
        return self._parts.movement.is_device_asked

    async def detach(self) -> None:
        """End all sessions, then stop the tiers cleanly, after the tasks have ended."""
        with log_as(self.said):
            await self.controller.close_sessions()
            if self._announcer is not None:
                await self._announcer.close()
            await self._parts.movement.detach()
            for kept in (*self._kept, *self._kept_later):
                kept.save()

    async def abandon(self) -> None:
        """Stop serving and remove the sockets, whatever came before. Idempotent."""
        await self._server.stop(None)
        if self._listener is not None:
            self._listener.close()
        self.sockets.remove()


def _close_late(opening: Future[HbmTier | None]) -> None:
    """Give a pool's memory back that came too late to be used."""
    hbm = None if opening.cancelled() or opening.exception() else opening.result()
    if hbm is not None:
        hbm.pool.close()


@contextmanager
def _without(builder: Builder[Any], absent: list[str]) -> Iterator[None]:
    """Log the error of a tier that cannot be used, and go on without the tier: it is ``absent``. NotOurs is raised."""
    try:
        yield
    except NotOurs:
        raise
    except (KVStoreError, OSError) as error:
        reason = error.message if isinstance(error, KVStoreError) else str(error)
        setting = "" if builder.setting in reason else f" ({builder.setting})"
        said = f"the {builder.name} tier is off: {reason}{setting}"
        absent.append(said)
        _log.error(said)


def _owner(keys: TenantKeys) -> str:
    """Return the name that marks the tenant's copies in tiers; empty without a secret."""
    return "" if keys == TenantKeys() else keys.digest.hex()


def _parts(settings: Settings, keys: TenantKeys, world: World, directory: NodeDirectory | None) -> Parts:
    arena = Arena(
        world.memory, world.faults, capacity_bytes=settings.arena.capacity_bytes,
        region_bytes=settings.arena.region_bytes,
        first_generation=1 + int.from_bytes(world.random.bytes(7), "little"),
    )  # fmt: skip
    return Parts(
        arena=arena,
        policy=POLICIES[settings.policy.eviction],
        limits=settings.limits,
        clock=world.clock,
        random=world.random,
        memory=world.memory,
        workers=world.workers,
        keys=keys,
        faults=world.faults,
        counters=Counters(),
        rounds=world.rounds,
        deadline_s=settings.controller.deadline_s,
        policies=settings.policy,
        node=settings.server.node,
        directory=directory,
        tracing=world.tracing,
        is_write_through=settings.tiers.is_write_through,
    )


def _grpc_server(
    controller: Controller, operators: Operators, prefills: PartialPrefills, parts: Parts, world: World
) -> tuple[Any, Any]:  # fmt: skip
    """Return the tenant's own gRPC server and its health service. Connections and calls are limited per tenant: calls
    by ``CallPlaces``, whose errors name the limit. gRPC has room for these, and refuses what comes beyond."""
    limits, counters = parts.limits, parts.counters
    places = CallPlaces(limits.call_count_max)
    options = [
        ("grpc.max_receive_message_length", limits.message_bytes_max),
        ("grpc.max_send_message_length", REPLY_BYTES_MAX),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", limits.connection_count_max),
        ("grpc.max_connection_idle_ms", int(limits.connection_idle_s_max * 1000)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=2 * limits.call_count_max + OVER_COUNT)
    cache = cache_pb2.DESCRIPTOR.services_by_name["CacheService"]
    admin = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
    prefill = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"]
    reloading = world.reloading if parts.keys.tenant == DEFAULT_TENANT else None
    for service, servicer in (
        (cache, CacheService(controller, world.random.bytes(EPOCH_BYTES))),
        (admin, AdminService(controller, operators, prefills, world.clock, os.getpid(), reloading)),
        (prefill, PrefillService(controller, prefills, parts.profiles)),
    ):
        register(server, service, servicer, counters, places.placed, world.tracing)
    health_service = CountedHealth(places.lasting, counters)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    own = health_pb2.DESCRIPTOR.services_by_name["Health"]
    named = [each.full_name for each in (cache, admin, prefill, own)]
    shown = CountedReflection((*named, reflection.SERVICE_NAME), places.lasting, counters)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(shown, server)
    return server, health_service


async def _report_healthy(health_service: Any) -> None:
    for module in (cache_pb2, admin_pb2, prefill_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            await health_service.set(service.full_name, health_pb2.HealthCheckResponse.SERVING)
