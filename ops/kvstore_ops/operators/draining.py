"""The drain of a whole service: of one tenant after the other, because each has stores of its own."""

from __future__ import annotations

from collections.abc import Callable

import typer

from kvstore.config import DEFAULT_TENANT
from kvstore.errors import KVStoreError
from kvstore.v1alpha import admin_pb2
from kvstore_ops import tenants
from kvstore_ops.door import Door
from kvstore_ops.operators.calls import Operator
from kvstore_ops.options import NOT_ALL, NOT_CONFIRMED

Change = Callable[..., admin_pb2.ChangeResponse]


def drain_service(door: Door, request: admin_pb2.ChangeRequest, change: Change, *, is_whole: bool) -> None:
    """Drain the service of the tenant behind ``door``, and by the default tenant's socket of all other tenants too
    where it ``is_whole``, and say whether it can be stopped. ``change`` asks before the first, and is told whose stores
    they are. Raises typer.Exit where a stop would lose something, or a tenant still stores, or other tenants cannot be
    seen or asked."""
    with door.open() as client:
        own = str(client.stats().tenant)
    is_all = is_whole and door.socket is not None and own == DEFAULT_TENANT  # others' sockets lie beside that one
    doors = {own: door, **(tenants.beside(door) if is_all else {})}
    code = 0
    confirmed: dict[str, bool] = {}
    for name, each in doors.items():
        if len(doors) > 1:
            typer.echo(f"tenant {name}:", err=True)
        try:
            with each.open() as client:
                found = change(Operator(client), request, tenant=name, **confirmed)
        except typer.Exit as ended:
            if ended.exit_code == NOT_CONFIRMED:
                raise
            code = code or ended.exit_code
            continue
        except KVStoreError as error:
            if each is door:
                raise
            typer.echo(f"kvstore: {error.message}", err=True)
            code = code or (0 if request.dry_run else NOT_ALL)
            continue
        finally:
            confirmed = {"yes": True}
        if not (request.dry_run or request.drain.end or found.refuses_stores):
            typer.echo(
                "kvstore: it takes stores: its release knows no drain of the service, or another operator ended this "
                "one",
                err=True,
            )
            code = code or NOT_ALL
    if is_all and (problem := tenants.unseen(door)):
        typer.echo(f"kvstore: this was the default tenant alone; {problem}", err=True)
        code = code or (0 if request.dry_run else NOT_ALL)
    if code:
        raise typer.Exit(code)
    if not (request.dry_run or request.drain.end):
        limits = "" if is_all else "as far as this tenant goes, "
        typer.echo(f"{limits}the service can be stopped: it takes no stores, and a stop loses nothing", err=True)
