"""Sidecars with several tenants, for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvstore_client import Client, connect
from kvstore_ops.sidecar import Sidecar

from tests.ports import free_port

NAMES = ("a", "b")


def secret_of(tenant: str) -> str:
    return f"the secret of tenant {tenant}, long enough for one"


def token_of(tenant: str) -> str:
    return f"the-token-of-tenant-{tenant}"


def write_private(path: Path, text: str) -> str:
    path.write_text(text + "\n")
    path.chmod(0o600)
    return str(path)


def tenants_sidecar(*arguments: str, names: tuple[str, ...] = NAMES, nvme: str = "0", **settings: str) -> Sidecar:
    """Tenants with secrets and tokens, besides the default one; ``settings`` are more of the environment."""
    sidecar = Sidecar(*arguments, nvme=nvme, plane="remote")
    sidecar.tcp_address = f"127.0.0.1:{free_port()}"  # no connection takes it while the sidecar is being restarted
    own: dict[str, str] = {}
    for name in names:
        section = f"KVSTORE__TENANTS__{name.upper()}__"
        own[section + "SECRET_FILE"] = write_private(sidecar.directory / f"{name}.secret", secret_of(name))
        own[section + "TOKEN_FILE"] = write_private(sidecar.directory / f"{name}.tokens", token_of(name))
    sidecar.environment = {**os.environ, **own, **settings}
    return sidecar


def client_of(sidecar: Sidecar, tenant: str, plane: str = "local", **options: Any) -> Client:
    if plane == "remote":
        return connect(sidecar.tcp_address, token=token_of(tenant), **options)
    return connect(f"unix://{sidecar.directory / 'run' / tenant / 'kvstore.sock'}", **options)
