"""Settings of tenants. Each tenant has an arena, a secret and sockets of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore.config.fields import Size, is_socket_path, wrong_setting
from kvstore.errors import InvalidRequest
from kvstore.units import format_bytes

DEFAULT_TENANT = "default"
NAME_CHARACTERS_MAX = 32
_NAME = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class TenantSettings:
    """One tenant ([tenants.md](tenants.md)). The default tenant needs no section: settings outside these sections are
    its own."""

    secret_file: str = ""
    """A file of mode 0600 with the secret, 32 characters or more, equal on all nodes; it names the tenant's chunks
    outside the process. Every tenant but `default` needs one."""
    envelope_key_file: str = ""
    """A file of mode 0600 with the keys that copies outside memory are sealed with, one per line, equal on all nodes;
    the first seals new copies ([trust.md](trust.md)). Empty: the key that follows from the secret."""
    token_file: str = ""
    """The tokens of its clients on other hosts, a file as `remote.token_file`."""
    capacity_bytes: Size
    """Hard cap of its memory. Default: `arena.capacity_bytes`."""
    nvme_capacity_bytes: Size
    """Hard cap of its files on the device; 0: no device tier. Default: what it was last; the first time
    `tiers.nvme.capacity_bytes`."""
    hbm_capacity_bytes: Size = 0
    """Bytes of the GPU's memory for a pool of its own. 0: none, but the default tenant's is `tiers.hbm.capacity_bytes`
    then."""
    uid: int | None = None
    """The user whose processes its sockets serve; none: the user of the server."""


def check_name(name: str) -> None:
    """Check a tenant's name, which is used in directories, labels and environment variables. Raises InvalidRequest."""
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARACTERS_MAX:
        raise InvalidRequest(
            f"[tenants.{name}]: a tenant's name is at most {NAME_CHARACTERS_MAX} lower-case letters and digits, with "
            "single - or _ between them"
        )


def check_tenants(
    tenants: Mapping[str, TenantSettings], socket_directory: Path, device_directory: Path, arena_bytes: int,
    memory_bytes: int,
) -> None:  # fmt: skip
    """Check the tenants, each and all together. Raises InvalidRequest naming the setting."""
    uids: dict[int, str] = {}
    for name, tenant in tenants.items():
        section = f"tenants.{name}"
        if not tenant.secret_file and name != DEFAULT_TENANT:
            raise InvalidRequest(
                f"{section}.secret_file is not set, and every tenant but default needs one: put 32 or more random "
                "characters into a file of mode 0600, the same on all nodes, and name it there",
                setting=f"{section}.secret_file",
            )
        if tenant.capacity_bytes < 8192:
            raise wrong_setting(f"{section}.capacity_bytes", tenant.capacity_bytes, "use at least 8 KiB")
        if tenant.nvme_capacity_bytes < 0:
            raise wrong_setting(f"{section}.nvme_capacity_bytes", tenant.nvme_capacity_bytes, "use 0 or more")
        if tenant.hbm_capacity_bytes > tenant.capacity_bytes:
            raise wrong_setting(
                f"{section}.hbm_capacity_bytes", tenant.hbm_capacity_bytes, "it has copies of what memory has: use at "
                f"most {section}.capacity_bytes, {tenant.capacity_bytes}, or raise that",
            )  # fmt: skip
        if (socket_directory / name).resolve().is_relative_to(device_directory.resolve()):
            raise wrong_setting(
                section, name, "its sockets would lie in tiers.nvme.directory: give the tenant another name, or set "
                "server.socket_directory",
            )  # fmt: skip
        path = socket_directory / name / "kvstore.sock"
        if not is_socket_path(path):
            raise wrong_setting(
                section, path, "a socket path has at most 99 bytes: shorten the name or server.socket_directory"
            )
        if tenant.uid is None:
            continue
        if not 0 <= tenant.uid < (1 << 32) - 1:
            raise wrong_setting(f"{section}.uid", tenant.uid, "use a user's number")
        if tenant.uid in uids:
            raise wrong_setting(
                f"{section}.uid", tenant.uid, f"it is tenants.{uids[tenant.uid]}.uid, too, and two tenants never share "
                "a user: give each its own",
            )  # fmt: skip
        uids[tenant.uid] = name
    _check_memory(tenants, arena_bytes, memory_bytes)


def _check_memory(tenants: Mapping[str, TenantSettings], arena_bytes: int, memory_bytes: int) -> None:
    """Raises InvalidRequest when the arenas do not fit into the machine's memory."""
    arenas = {DEFAULT_TENANT: arena_bytes, **{name: tenant.capacity_bytes for name, tenant in tenants.items()}}
    if tenants and sum(arenas.values()) > memory_bytes:
        largest = max(tenants, key=lambda name: tenants[name].capacity_bytes)
        raise wrong_setting(
            f"tenants.{largest}.capacity_bytes", format_bytes(arenas[largest]),
            f"the arenas of all {len(arenas)} tenants come to {format_bytes(sum(arenas.values()))} and this machine "
            f"has {format_bytes(memory_bytes)}: lower it, or another's, or arena.capacity_bytes",
        )  # fmt: skip
