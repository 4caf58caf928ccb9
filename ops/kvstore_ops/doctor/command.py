"""The command: all checks, one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from kvstore import __version__
from kvstore.config import LoadedSettings
from kvstore.errors import Exhausted, KVStoreError, PermissionDenied
from kvstore_ops.doctor.bucket import look_at_bucket
from kvstore_ops.doctor.device import look_at_device
from kvstore_ops.doctor.engines import look_at_redis, look_at_settings, look_at_tiers
from kvstore_ops.doctor.finding import Finding, Health, render_findings
from kvstore_ops.doctor.machine import look_at_machine
from kvstore_ops.doctor.removal import removed_from
from kvstore_ops.doctor.round import Round
from kvstore_ops.door import Door, door_of
from kvstore_ops.operators.calls import Operator
from kvstore_ops.options import (
    UNWELL,
    AddressOption,
    ConfigOption,
    JsonOption,
    TenantOption,
    TlsOption,
    load_settings,
)


def doctor(
    config: ConfigOption = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Send a chunk to shared tiers, too, and remove it again.")
    ] = False,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Check this machine, the settings and the running sidecar: show each problem, its effect and its remedy.

    Run it as the service's user, with its --config and environment. Ends with 11 when a check is bad.

    Example: kvstore doctor --config /etc/kvstore.toml
    """
    findings = list(_looks(load_settings(config), door_of(address, tenant, tls), with_shared=shared))
    if as_json:
        print(json.dumps([each.as_dict() for each in findings], indent=2))
    else:
        Console().print(render_findings(findings))
    if any(each.health is Health.BAD for each in findings):
        raise typer.Exit(UNWELL)


def _looks(loaded: LoadedSettings, door: Door, *, with_shared: bool) -> Iterator[Finding]:
    yield from look_at_machine(loaded)
    yield from look_at_device(loaded.settings)
    yield from look_at_redis(loaded.settings)
    yield from look_at_bucket(loaded.settings.tiers.s3)
    refused = list(_sessions(door))
    yield from refused
    try:
        with door.open() as client:
            version = client.stats().version
            yield _version(version)
            try:
                report = Operator(client).tiers()
                yield from look_at_tiers(report)
                yield from look_at_settings(report, loaded.settings)
                least = loaded.settings.tiers.s3.chunk_bytes_min if with_shared else 0
                remove = partial(removed_from, loaded.settings)
                yield from Round(client, least, remove).looks(with_shared=with_shared)
            except PermissionDenied as error:
                yield Finding("round", Health.UNSEEN, error.message)
    except KVStoreError as error:
        if refused and isinstance(error, Exhausted):
            return  # it is said: those that are kept for operators are taken, too
        yield Finding(
            "sidecar", Health.BAD, error.message, "engines compute everything themselves",
            "start it: kvstore serve; or say where it is: --address",
        )  # fmt: skip


def _sessions(door: Door) -> Iterator[Finding]:
    """Find that the sidecar takes no further engine. What else keeps one out is found by the operator's session."""
    try:
        door.check_engine()
    except Exhausted as error:
        yield Finding(
            "sessions", Health.BAD, error.message, "further engines are refused, and compute everything themselves",
            "end clients that are not needed; or raise the limit in the settings, and take it over: kvstore reload",
        )  # fmt: skip
    except KVStoreError:
        return


def _version(version: str) -> Finding:
    if version != __version__:
        return Finding(
            "sidecar", Health.WEAK, f"version {version}, and this command is {__version__}",
            "commands and clients may ask for what it does not have", "install the same release on both sides",
        )  # fmt: skip
    return Finding("sidecar", Health.GOOD, f"version {version}, as this command")


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(doctor)
