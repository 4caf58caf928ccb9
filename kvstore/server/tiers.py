"""Builds a tenant's tiers below memory, on real disks and networks, and the directory of nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from blake3 import blake3

from kvstore.chunk import Trust
from kvstore.config import NvmeSettings, RedisAddress, Settings
from kvstore.config.machine import CAPACITY_FILE
from kvstore.directory import NodeDirectory
from kvstore.errors import Exhausted, Unavailable
from kvstore.seams import Clock, Disk, FaultPoints, MoverProcesses, OwnThreads, Workers, WorkerThreads
from kvstore.seams.devices import Device, HostDevice
from kvstore.seams.scheduler import MOVER_NICE
from kvstore.server.descriptors import Need
from kvstore.server.trust import trust_of
from kvstore.server.world import TierOwner, World
from kvstore.spec import encoding_of
from kvstore.tiers import LocalTier, SharedUse, UploadClaims, WritePolicy
from kvstore.tiers.hbm import HbmTier, Pool
from kvstore.tiers.nvme import Directory, NvmeTier, PlainCopies, PosixIO, Regions
from kvstore.tiers.redis.embedded import EmbeddedServer
from kvstore.tiers.s3 import Lanes, S3Tier

COPY_ON_WRITE = ("btrfs", "zfs", "bcachefs")
KEEPER_COUNT = 4
REGION_FILES_BESIDES = 32
"""Region files beyond twice the capacity's. The first files of each chunk size are small, and double in size up to
``region_bytes``. Twice, because a file holds whole chunks only, which may fill just half of it."""
ASKER_COUNT = 16
"""Lookups that wait for a bucket at once."""
CLAIM_FILES = 4
"""Connections to the Redis in which uploads to S3 are claimed."""
USUAL_CHUNK_BYTES = 32 << 20
"""256 tokens of an 8B model in bf16, as docs/cluster.md has them. A device tier that is smaller is warned of."""
Built = TypeVar("Built", covariant=True)
_log = logging.getLogger("kvstore.nvme")


@dataclass(frozen=True)
class Builder(Generic[Built]):
    """Makes one kind of tier for a tenant. ``name``: the tier's name in settings and logs. ``setting``: the setting to
    change when the tier cannot be built.

    ``build`` takes the tenant's settings, the process's world, and the owner of the tier's copies. It returns a tier
    that is not recovered yet, or None where the settings switch it off. Raises NotOurs, which ends the start; other
    KVStoreErrors and OSError, after which the service runs without the tier."""

    name: str
    setting: str
    build: Callable[[Settings, World, TierOwner], Built | None]
    needs: Callable[[Settings], list[Need]] = lambda _: []
    """Returns the open files that the tier may need."""


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Builders of a tenant's tiers below memory, the fastest first. A shared tier comes with its settings of use."""

    local: tuple[Builder[LocalTier], ...]
    hbm: Builder[HbmTier] | None = None
    """Opens the pool on a device."""
    shared: tuple[Builder[SharedUse], ...] = ()
    directory: Callable[[Settings, World, str], NodeDirectory | None] = lambda *_: None
    """Opens the directory in which nodes tell each other what they have. The third argument is the owner's name."""

    def needs(self, settings: Settings) -> list[Need]:
        """Return the open files that all tiers may need."""
        hbm = () if self.hbm is None else (self.hbm,)
        return [need for each in (*hbm, *self.local, *self.shared) for need in each.needs(settings)]


def _build_hbm(settings: Settings, world: World, _owner: TierOwner) -> HbmTier | None:
    """Open the pool; see ``Builder``. A CUDA context begins here, in this process, which forks no more: its byte movers
    are there already. A tenant's pool is its own: whoever maps it may write it."""
    hbm = settings.tiers.hbm
    if not hbm.capacity_bytes:
        return None
    try:
        device = _device(hbm.device, world)
        first = 1 + int.from_bytes(world.random.bytes(7), "little")
        pool = Pool(device, world.memory, hbm.capacity_bytes, first)
    except Exhausted as error:
        raise Exhausted(f"{error.message}: lower tiers.hbm.capacity_bytes, or use another device") from error
    except Unavailable as error:
        raise Unavailable(
            f"{error.message}: install an NVIDIA driver, name a GPU that this process sees, or set "
            "tiers.hbm.capacity_bytes = 0"
        ) from error
    return HbmTier(pool, WorkerThreads(1, "hbm", nice=MOVER_NICE), world.clock)


def _device(name: str, world: World) -> Device:
    if name == HostDevice.identity:
        return HostDevice(world.memory)
    from kvstore.seams.devices.cuda import CudaDevice, ordinal_of  # only where there is to be a GPU

    return CudaDevice(ordinal_of(name))


def _build_nvme(settings: Settings, world: World, owner: TierOwner) -> NvmeTier | None:
    nvme = settings.tiers.nvme
    if not nvme.capacity_bytes:
        return None
    trust = Trust("none", owner.ring) if nvme.envelope == "none" else trust_of("nvme", nvme.envelope, owner)
    record = settings.server.state_directory / "plain" / blake3(bytes(nvme.directory.absolute())).hexdigest(16)
    plain = PlainCopies(trust, world.disk, record)
    try:
        return open_nvme(nvme, world.disk, world.clock, world.faults, world.movers, owner.name, plain)
    except OSError as error:
        raise Unavailable(f"{nvme.directory}: {error.strerror}") from error


def _needs_of_hbm(settings: Settings) -> list[Need]:
    """Return the open files of a pool: its memory and its generations, and what a GPU's driver opens."""
    hbm = settings.tiers.hbm
    return [Need(64, "tiers.hbm.capacity_bytes", hbm.capacity_bytes, "0: none")] if hbm.capacity_bytes else []


def _needs_of_nvme(settings: Settings) -> list[Need]:
    nvme = settings.tiers.nvme
    if not nvme.capacity_bytes:
        return []
    there = len(list(nvme.directory.glob("region-*.kvs")))
    files = max(2 * -(-nvme.capacity_bytes // nvme.region_bytes), there) + REGION_FILES_BESIDES
    return [Need(files, "tiers.nvme.region_bytes", nvme.region_bytes, "one for each region file: raise it")]


def _build_redis(settings: Settings, world: World, owner: TierOwner) -> SharedUse | None:
    """Build the tier; see ``Builder``. It is built even if its server cannot be reached, because the server may come
    later. Each tenant has an embedded server of its own. Raises Unavailable where that cannot be started."""
    redis = settings.tiers.redis
    if not redis.is_on:
        return None
    from kvstore.tiers.redis.reads import JOB_BYTES_MAX  # redis-py costs memory and time: only where it is used
    from kvstore.tiers.redis.tier import RedisTier

    trust = trust_of("redis", redis.envelope, owner)
    own = None
    if redis.embedded:
        own = EmbeddedServer(
            settings.server.state_directory / "redis" / (owner.name or "default"), redis.embedded_bytes
        )
        own.start()
    tier = RedisTier(
        redis, clock=world.clock, own=own, trust=trust,
        readers=world.movers.lane("redis-read", redis.reader_count, nice=MOVER_NICE),
        writers=world.movers.lane("redis-write", redis.writer_count, nice=MOVER_NICE),
    )  # fmt: skip
    tier.begin()
    write = WritePolicy(redis.write)
    return SharedUse(
        tier=tier, lookup_s_max=redis.lookup_s_max, write=write, piece_bytes_max=JOB_BYTES_MAX,
        ends_with_us=redis.embedded,
    )  # fmt: skip


def _open_directory(settings: Settings, world: World, owner: str) -> NodeDirectory | None:
    """Return the directory in which nodes tell each other what they have; None where they share no Redis. Does not
    connect yet."""
    redis = settings.tiers.redis
    if not redis.url:
        return None
    from kvstore.tiers.redis.commands import Commands
    from kvstore.tiers.redis.topology import topology_of

    servers = Commands(topology_of(redis, RedisAddress.of(redis.url), redis.control_count))
    return NodeDirectory(servers, settings.server.node, redis.prefix, owner, world.clock, world.random)


def _needs_of_redis(settings: Settings) -> list[Need]:
    """Return the open files that the tier's connections need."""
    redis = settings.tiers.redis
    if not redis.is_on:
        return []
    return [Need(2 * redis.control_count + 4, "tiers.redis.control_count", redis.control_count, "one each: lower it")]


def _build_s3(settings: Settings, world: World, owner: TierOwner) -> SharedUse | None:
    """Build the tier; see ``Builder``. It is built even if the bucket cannot be reached, because that may change."""
    s3 = settings.tiers.s3
    if not s3.bucket:
        return None
    trust = trust_of("s3", s3.envelope, owner)
    lanes = Lanes(
        readers=world.movers.lane("s3-read", s3.reader_count, nice=MOVER_NICE),
        writers=world.movers.lane("s3-write", s3.writer_count, nice=MOVER_NICE),
        askers=world.movers.lane("s3-ask", ASKER_COUNT, nice=MOVER_NICE),
        near=WorkerThreads(1, "s3-near", nice=MOVER_NICE),
    )
    account = settings.server.state_directory / "s3" / (owner.name or "default")
    tier = S3Tier(s3, lanes, world.clock, trust, _claims(settings, world), account)
    tier.prepare()
    return SharedUse(
        tier=tier, lookup_s_max=s3.lookup_s_max, write=WritePolicy(s3.write), piece_bytes_max=s3.range_bytes
    )


def _claims(settings: Settings, world: World) -> UploadClaims | None:
    """Return the claims of uploads in the Redis that nodes share; None where they share none."""
    if not settings.tiers.redis.url:
        return None
    from kvstore.tiers.redis.claims import RedisClaims  # redis-py costs memory and time: only where it is used

    return RedisClaims(settings.tiers.redis, world.clock)


def _needs_of_s3(settings: Settings) -> list[Need]:
    """Return the open files that the tier's connections need."""
    s3 = settings.tiers.s3
    files = s3.reader_count + s3.writer_count + ASKER_COUNT + CLAIM_FILES
    return [Need(files, "tiers.s3.reader_count", s3.reader_count, "one each: lower it")] if s3.bucket else []


TIERS = Tiers(
    hbm=Builder("hbm", "tiers.hbm.device", _build_hbm, _needs_of_hbm),
    local=(Builder("nvme", "tiers.nvme.directory", _build_nvme, _needs_of_nvme),),
    shared=(
        Builder("redis", "tiers.redis.url", _build_redis, _needs_of_redis),
        Builder("s3", "tiers.s3.bucket", _build_s3, _needs_of_s3),
    ),
    directory=_open_directory,
)
"""The builders that ``kvstore serve`` uses."""


def open_nvme(
    settings: NvmeSettings, disk: Disk, clock: Clock, faults: FaultPoints, movers: MoverProcesses | None = None,
    owner: str = "", plain: PlainCopies | None = None,
) -> NvmeTier:  # fmt: skip
    """Return the tier, not recovered yet. Its bytes are moved by ``movers``, or by threads of this process. ``owner``:
    see ``Directory``; ``plain``: see ``NvmeTier``.

    Raises NotOurs; Unavailable or OSError when the directory cannot be used."""
    lender = movers or OwnThreads()
    directory = Directory(settings.directory, disk, faults, owner, lender)
    kind = disk.file_system(settings.directory)
    if kind in COPY_ON_WRITE:
        _log.warning(
            "tiers.nvme.directory lies on a copy-on-write file system: writes go to new places, so room taken in "
            "advance is no promise and rates suffer; use ext4 or xfs, or switch it off for the directory (chattr +C)",
            extra={"file_system": kind},
        )
    if settings.capacity_bytes < USUAL_CHUNK_BYTES:
        _log.warning(
            "tiers.nvme.capacity_bytes is less than one chunk of an 8B model takes: raise it, or set 0 for no device "
            "tier",
            extra={"capacity_bytes": settings.capacity_bytes, "chunk_bytes": USUAL_CHUNK_BYTES},
        )
    _keep_capacity(directory, settings.capacity_bytes)
    io = PosixIO(disk)
    regions = Regions(
        settings.directory, disk, io, faults,
        capacity_bytes=settings.capacity_bytes, region_bytes=settings.region_bytes, lender=lender,
    )  # fmt: skip
    return NvmeTier(
        directory, regions, disk=disk, io=io, clock=clock, faults=faults,
        readers=_workers(movers, "nvme-read", settings.reader_count),
        writers=_workers(movers, "nvme-write", settings.writer_count),
        keepers=WorkerThreads(KEEPER_COUNT, "nvme-keep", nice=MOVER_NICE),
        encoding=encoding_of(settings.encoding), plain=plain,
    )  # fmt: skip


def _keep_capacity(directory: Directory, capacity_bytes: int) -> None:
    """Write down the capacity in force: it is the default of later starts. So the default does not change with the free
    room of the disk."""
    said = str(capacity_bytes).encode()
    try:
        if directory.read(CAPACITY_FILE) == said:
            return
    except OSError:
        pass  # there is no such file, or it is damaged: it is written below
    try:
        directory.write(CAPACITY_FILE, said)
    except OSError as error:
        _log.warning(
            "the capacity could not be written down: set tiers.nvme.capacity_bytes, or the next start chooses anew",
            extra={"capacity_bytes": capacity_bytes, "reason": str(error)},
        )


def _workers(movers: MoverProcesses | None, name: str, count: int) -> Workers:
    return movers.lane(name, count, nice=MOVER_NICE) if movers else WorkerThreads(count, name, nice=MOVER_NICE)
