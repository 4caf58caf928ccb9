"""The settings tree: the server, memory and the device, and all sections together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from kvstore.config.fields import NATIVE_NUMBER_MAX, Duration, Size, check_setting, is_socket_path
from kvstore.config.limits import LimitSettings
from kvstore.config.redis import RedisSettings
from kvstore.config.remote import RemoteSettings
from kvstore.config.s3 import S3Settings
from kvstore.config.tenants import DEFAULT_TENANT, TenantSettings
from kvstore.policy import POLICIES
from kvstore.spec import ENCODING_SETTINGS, ENVELOPES, Durability
from kvstore.units import GIB, MIB, PAGE_BYTES, is_port

LEVEL_SETTINGS = {
    Durability.LOCAL: "tiers.nvme.capacity_bytes",
    Durability.SHARED: "tiers.redis.url",
    Durability.OBJECT: "tiers.s3.bucket",
}
"""The setting that turns on the tier of a durability level."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The service's directories, its name, and its metrics and logs for operators."""

    state_directory: Path
    """Directory of the lock, the list of chunks that were on the device before it was sealed, the measured speeds of
    tiers and engines, registered models and profiles, pins, the count of tokens fetched in the last 48 hours, and the
    device tier unless it is elsewhere.
    Default: `$XDG_STATE_HOME/kvstore`, else `~/.local/state/kvstore`."""
    socket_directory: Path
    """Directory of `kvstore.sock` (gRPC) and `data.sock` (hand-off of memory). Default: `$XDG_RUNTIME_DIR/kvstore`,
    else `run` in the state directory."""
    node: str
    """This node's name for other nodes: 1 to 128 letters, digits and `. _ : -`. Default: the host's name."""
    metrics_host: str = "127.0.0.1"
    """Address of the page for browsers (`/`), of Prometheus' (`/metrics`), and of `/healthz` and `/readyz` for probes.
    Its readers see tenants' names and counts; the page has models' names, too."""
    metrics_port: int = 9464
    """Port of these pages. If the default port is taken, a free one is used."""
    metrics_token_file: str = ""
    """A file that only this user can read, with one token per line. Readers of the page or of `/metrics` have to give
    a token, as a password (with any user name) or as a bearer token. The page needs it on addresses other than
    loopback, and where there are several tenants."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    log_format: str = "json"
    """`json` or `text`."""
    shutdown_grace_s: Duration = 10.0
    """Longest wait of a stop for calls in progress, and again for copies on their way to slower tiers."""

    def __post_init__(self) -> None:
        named = re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", self.node) is not None
        check_setting(named, "server.node", self.node, "use 1 to 128 letters, digits and . _ : -")
        check_setting(
            bool(self.metrics_host), "server.metrics_host", "''", "every address of the machine would show metrics: "
            "use 127.0.0.1, or 0.0.0.0 if that is meant",
        )  # fmt: skip
        check_setting(0 <= self.metrics_port <= 65535, "server.metrics_port", self.metrics_port, "use 0..65535")
        levels = ("debug", "info", "warning", "error")
        check_setting(self.log_level in levels, "server.log_level", self.log_level, f"use one of {', '.join(levels)}")
        check_setting(self.log_format in ("json", "text"), "server.log_format", self.log_format, "use json or text")
        check_setting(self.shutdown_grace_s >= 0, "server.shutdown_grace_s", self.shutdown_grace_s, "use >= 0")
        path = self.socket_directory / "kvstore.sock"
        is_plain = unquote(str(path)) == str(path) and not {"?", "#"} & set(str(path))
        check_setting(is_plain, "server.socket_directory", path, "gRPC reads it as a URL: use no %, ? or #")
        check_setting(is_socket_path(path), "server.socket_directory", path, "a socket path has at most 99 bytes")


@dataclass(frozen=True, kw_only=True)
class ArenaSettings:
    """The memory tier, which clients of the node map."""

    capacity_bytes: Size
    """Hard cap of the memory tier, headers included. Default: a quarter of memory, at most 4 GiB."""
    region_bytes: Size = 256 * MIB
    """Size of one shared mapping; a layer of a chunk must fit into one."""
    prefault: bool = True
    """`true`: the memory is taken from the system at the start; `false`: at its first use."""

    def __post_init__(self) -> None:
        region, capacity = self.region_bytes, self.capacity_bytes
        fits = region % PAGE_BYTES == 0 and region >= PAGE_BYTES
        check_setting(fits, "arena.region_bytes", region, f"use a multiple of {PAGE_BYTES}")
        check_setting(capacity >= PAGE_BYTES * 2, "arena.capacity_bytes", capacity, "use at least 8 KiB")


@dataclass(frozen=True, kw_only=True)
class NvmeSettings:
    """The device tier: chunks in files, which outlive the sidecar."""

    directory: Path
    """Directory of the files; put it on the fastest local device. Default: `nvme` in `server.state_directory`."""
    capacity_bytes: Size
    """Hard cap of the files; 0: no device tier. A smaller cap drops files at the next start, and names them before.
    Default: what it was last; the first time a tenth of the free room, at most 16 GiB."""
    region_bytes: Size = GIB
    """Size of one file."""
    encoding: str = "raw"
    """`raw` or `lz4`. `lz4` takes a sixth less room for bf16 caches and more processor time; layers of such a chunk
    land together."""
    write: str = "back"
    """`back` acknowledges a store from memory and writes at once; `through` acknowledges it when the device has it."""
    reader_count: int = 8
    """Threads of the byte movers that read, 1 to 64."""
    writer_count: int = 2
    """Threads of the byte movers that write, 1 to 64."""
    envelope: str = "none"
    """The envelope that proves new chunks to be ours: `none`, `mac`, or `aead`, which also encrypts them
    ([trust.md](trust.md)). Chunks from before it was turned on stay as they are, and are still read: LOCAL stays
    LOCAL."""

    def __post_init__(self) -> None:
        check_setting(self.envelope in ENVELOPES, "tiers.nvme.envelope", self.envelope, "use none, mac or aead")
        check_setting(self.capacity_bytes >= 0, "tiers.nvme.capacity_bytes", self.capacity_bytes, "use 0 or more")
        check_setting(self.region_bytes >= MIB, "tiers.nvme.region_bytes", self.region_bytes, "use at least 1 MiB")
        check_setting(self.encoding in ENCODING_SETTINGS, "tiers.nvme.encoding", self.encoding, "use raw or lz4")
        check_setting(self.write in ("back", "through"), "tiers.nvme.write", self.write, "use back or through")
        for name in ("reader_count", "writer_count"):
            count = getattr(self, name)
            check_setting(1 <= count <= 64, f"tiers.nvme.{name}", count, "use 1..64")


@dataclass(frozen=True, kw_only=True)
class HbmSettings:
    """A pool of a GPU's memory, with copies of chunks that are in memory, too: for engines on that GPU, which copy them
    there without a transfer from the host ([gpu.md](gpu.md#the-pool))."""

    capacity_bytes: Size = 0
    """Bytes of the GPU's memory that the sidecar takes at its start, at most `arena.capacity_bytes`; 0: no pool."""
    device: str = "cuda:0"
    """The GPU, as the sidecar's process numbers them: `cuda:0`, `cuda:1`. `cpu`: the host's memory in the place of a
    GPU, for tests."""

    def __post_init__(self) -> None:
        size = self.capacity_bytes
        fits = size == 0 or size >= PAGE_BYTES * 2
        check_setting(fits, "tiers.hbm.capacity_bytes", size, "use 0, or at least 8 KiB")
        known = re.fullmatch(r"cpu|cuda:\d{1,3}", self.device) is not None
        check_setting(known, "tiers.hbm.device", self.device, "use cuda:0, cuda:1, or cpu")


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """The tiers beside memory."""

    nvme: NvmeSettings
    hbm: HbmSettings = field(default_factory=HbmSettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    s3: S3Settings = field(default_factory=S3Settings)

    @property
    def is_write_through(self) -> bool:
        """True when a store is acknowledged only once a tier below memory has it."""
        return self.nvme.write == "through"


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The eviction policy, and the background checks of copies."""

    eviction: str = "lru"
    """The policy that chooses the chunks to evict; `lru`, the least recently used first, is the only one."""
    demotion_wait_s: Duration = 1.0
    """Longest wait of a store until the device has taken the chunks that it evicts from memory."""
    scrub_bytes_per_s: Size = 16 * MIB
    """Rate at which copies are read again in the background, to find damage, but no more than 50 chunks a second, and
    none twice in ten minutes; 0: never."""
    warm_up_bytes: Size = 0
    """Bytes that a node with a young memory brings of each model that an engine registers, once: what another node that
    shares its Redis and has this setting fetches most ([cluster.md](cluster.md)). It needs `tiers.redis.url`. 0:
    none."""
    canary_interval_s: Duration = 60.0
    """Interval at which a small chunk is sent through each local tier, to check that the tier works, and a tenth as
    often through each shared tier that this node writes to; 0: never."""

    def __post_init__(self) -> None:
        check_setting(self.eviction in POLICIES, "policy.eviction", self.eviction, f"use one of {', '.join(POLICIES)}")
        for name in ("demotion_wait_s", "scrub_bytes_per_s", "warm_up_bytes", "canary_interval_s"):
            check_setting(getattr(self, name) >= 0, f"policy.{name}", getattr(self, name), "use 0 or more")


@dataclass(frozen=True, kw_only=True)
class EventSettings:
    """The publication of stored and removed chunks for routers, as vLLM publishes its blocks ([events.md](events.md)).
    Only digests are published."""

    endpoint: str = ""
    """ZMQ address where batches are published (PUB), like `tcp://127.0.0.1:5557`. Empty: off."""
    replay_endpoint: str = ""
    """ZMQ address where subscribers ask for batches again (ROUTER). Empty: off."""
    topic: str = "kv-events"
    """The first frame of each message."""
    buffer_count: int = 10_000
    """Batches kept for replay, and queued for a slow subscriber: 64 MiB of them at most."""
    allow_remote: bool = False
    """`true`: addresses other than loopback and `ipc://` are allowed; nothing is encrypted there."""

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            local = address.startswith(("tcp://127.0.0.1:", "tcp://[::1]:", "ipc://"))
            remedy = (
                "use tcp://127.0.0.1:PORT or ipc:///path; whoever reaches another address reads what is stored, so "
                "that takes events.allow_remote = true, too"
            )
            port = address.rpartition(":")[2]
            has_place = address.startswith("ipc://") or port == "*" or is_port(port)  # ZMQ takes 65537 for port 1
            known = has_place and (local or (self.allow_remote and address.startswith("tcp://")))
            check_setting(not address or known, f"events.{name}", address, remedy)
        needs = not self.replay_endpoint or bool(self.endpoint)
        check_setting(needs, "events.replay_endpoint", self.replay_endpoint, "set events.endpoint, too")
        apart = not self.endpoint or self.endpoint != self.replay_endpoint
        check_setting(apart, "events.replay_endpoint", self.replay_endpoint, "it is events.endpoint, too: use another")
        fits = 1 <= self.buffer_count <= NATIVE_NUMBER_MAX
        check_setting(fits, "events.buffer_count", self.buffer_count, f"use 1 to {NATIVE_NUMBER_MAX}")


@dataclass(frozen=True, kw_only=True)
class TracingSettings:
    """The export of spans of requests ([operations.md](operations.md#traces)). Spans have counts, tiers and the tenant,
    and no digest, token or model's name."""

    endpoint: str = ""
    """OTLP over gRPC, like `http://127.0.0.1:4317`, or `https://HOST:PORT`. Empty: off. Needs `kvstore[tracing]`."""
    sample_one_in: int = 0
    """Share of traced requests among those without an engine's trace: one in this many; 0: none. Requests with an
    engine's trace follow its sampling decision."""

    def __post_init__(self) -> None:
        at = re.fullmatch(r"https?://[^/\s@]+:(\d+)", self.endpoint)
        known = not self.endpoint or (at is not None and is_port(at[1]))
        check_setting(known, "tracing.endpoint", self.endpoint, "use http://HOST:PORT or https://HOST:PORT")
        check_setting(self.sample_one_in >= 0, "tracing.sample_one_in", self.sample_one_in, "use 0 or more")


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """The limit on the wait of a call."""

    deadline_s: Duration = 10.0
    """Longest wait of a call, whatever deadline its caller gives. Only a wait for a receipt's level, or for a store in
    flight, may take longer."""

    def __post_init__(self) -> None:
        check_setting(self.deadline_s > 0, "controller.deadline_s", self.deadline_s, "use more than 0")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The whole tree. Only start-up sees it."""

    server: ServerSettings
    arena: ArenaSettings
    tiers: TierSettings
    limits: LimitSettings
    policy: PolicySettings = field(default_factory=PolicySettings)
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    events: EventSettings = field(default_factory=EventSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)
    remote: RemoteSettings = field(default_factory=RemoteSettings)
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        state, device = self.server.state_directory, self.tiers.nvme.directory
        check_setting(
            os.path.realpath(state) != os.path.realpath(device), "tiers.nvme.directory", device, "it is "
            f"server.state_directory, too, and each has a lock of its own: use a directory in it, like {device}/nvme",
        )  # fmt: skip
        check_setting(
            self.tiers.hbm.capacity_bytes <= self.arena.capacity_bytes, "tiers.hbm.capacity_bytes",
            self.tiers.hbm.capacity_bytes, "it has copies of what memory has: use at most arena.capacity_bytes, "
            f"{self.arena.capacity_bytes}, or raise that",
        )  # fmt: skip
        check_setting(
            not self.policy.warm_up_bytes or bool(self.tiers.redis.url), "policy.warm_up_bytes",
            self.policy.warm_up_bytes, "nodes leave hints for each other in a Redis that they share: set "
            "tiers.redis.url to it. A tiers.redis.embedded is this node's own, and a bucket holds no hints: leave this "
            "at 0 there, and bring chunks with kvstore warm --from",
        )  # fmt: skip

    @property
    def tenant_names(self) -> list[str]:
        """The default tenant, which always exists, then the others."""
        return [DEFAULT_TENANT, *(name for name in self.tenants if name != DEFAULT_TENANT)]
