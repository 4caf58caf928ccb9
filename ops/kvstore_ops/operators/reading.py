"""``kvstore tiers``, ``ls``, ``show`` and ``models``: commands that only read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvstore.seams import SystemClock
from kvstore_ops.door import door_of
from kvstore_ops.operators import tables
from kvstore_ops.operators.calls import Operator
from kvstore_ops.operators.words import selection_of, wanted_of
from kvstore_ops.options import NOT_FOUND, AddressOption, JsonOption, TenantOption, TlsOption

ModelOption = Annotated[
    str, typer.Option("--model", help="Only this model's: its id, its last part, or 8 digits of its fingerprint.")
]
DigestOption = Annotated[str, typer.Option("--digest", help="Only chunks whose digest begins with these digits.")]
TierOption = Annotated[str, typer.Option("--tier", help="Only chunks that this tier has: memory, nvme, redis, s3.")]
OlderOption = Annotated[str, typer.Option("--older-than", help="Only what has been stored for so long, like '2 h'.")]

PromptOption = Annotated[
    Path | None,
    typer.Option(help="Only a prompt's chunks: JSON token ids, or text with --tokenizer. Needs --model."),
]
TokenizerOption = Annotated[
    str, typer.Option(help="A directory with a transformers tokenizer, or its name in this machine's cache.")
]


@contextmanager
def operator(address: str | None, tenant: str, tls: str) -> Iterator[Operator]:
    """Yield the calls to one sidecar, as one of its tenants."""
    with door_of(address, tenant, tls).open() as client:
        yield Operator(client)


def show_tiers(
    address: AddressOption = None, tenant: TenantOption = "", tls: TlsOption = "", as_json: JsonOption = False
) -> None:
    """Show each tier: its state, its contents, its backlog and its problems.

    Example: kvstore tiers
    """
    with operator(address, tenant, tls) as asked:
        found = asked.tiers()
    if as_json:
        print(json.dumps(tables.tiers_as_dict(found), indent=2))
        return
    Console().print(tables.render_tiers(found))


def list_chunks(
    model: ModelOption = "",
    digest: DigestOption = "",
    tier: TierOption = "",
    older_than: OlderOption = "",
    prompt: PromptOption = None,
    tokenizer: TokenizerOption = "",
    larger_than: Annotated[str, typer.Option(help="Only chunks of this size or more, like '1 MiB'.")] = "",
    smaller_than: Annotated[str, typer.Option(help="Only chunks of this size or less.")] = "",
    used_at_most: Annotated[int | None, typer.Option(help="Only chunks that were used so often at most.")] = None,
    limit: Annotated[int, typer.Option(help="Show so many at most; the totals are of all.", min=0, max=1 << 30)] = 50,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """List chunks, and print the totals of all selected chunks.

    Example: kvstore ls --model my-model --tier nvme --older-than '1 d'
    """
    with operator(address, tenant, tls) as asked:
        wanted = wanted_of(
            asked, model, digest, tier, older_than, prompt, tokenizer, larger_than, smaller_than, used_at_most,
            everything=True,
        )  # fmt: skip
        pages = list(asked.chunks(wanted, limit))
    chunks = [chunk for page in pages for chunk in page.chunks]
    totals = pages[-1].totals
    if as_json:
        found = {"chunks": list(map(tables.chunk_as_dict, chunks)), "totals": list(map(tables.total_as_dict, totals))}
        print(json.dumps(found, indent=2))
        return
    Console().print(tables.render_chunks(chunks, totals, SystemClock().wall()))


def show_chunk(
    digest: Annotated[str, typer.Argument(help="A chunk's digest, or 4 of its first digits or more.")],
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show one chunk: its copies, its durability, its chain, its holders, and its header.

    Example: kvstore show 3fa9c1
    """
    with operator(address, tenant, tls) as asked:
        found = asked.show(digest)
    if as_json:
        print(json.dumps(tables.shown_as_dict(found), indent=2))
    elif found.parts:
        Console().print(tables.render_shown(found, SystemClock().wall()))
    if not found.parts:
        why = tables.shown_as_dict(found)["reason"]
        gone = f": it was here and is gone ({why})" if found.reason else ""
        typer.echo(
            f"kvstore: no chunk is stored whose digest begins with {digest[:64]!r}{gone}: kvstore ls has the others",
            err=True,
        )
        raise typer.Exit(NOT_FOUND)


def show_models(
    address: AddressOption = None, tenant: TenantOption = "", tls: TlsOption = "", as_json: JsonOption = False
) -> None:
    """Show the stored chunks of each model, by tier. A model has no name until its engine registers it.

    Example: kvstore models
    """
    with operator(address, tenant, tls) as asked:
        totals = asked.totals(selection_of())
    if as_json:
        print(json.dumps(list(map(tables.total_as_dict, totals)), indent=2))
        return
    Console().print(tables.render_models(totals))


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("tiers")(show_tiers)
    app.command("ls")(list_chunks)
    app.command("show")(show_chunk)
    app.command("models")(show_models)
