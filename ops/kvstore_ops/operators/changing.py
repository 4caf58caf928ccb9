"""``kvstore evict``, ``pin``, ``unpin``, ``move``, ``prefetch``, ``verify``, ``drain`` and ``reload``.

Each has a dry run that changes nothing and counts the chunks that the run would change. Commands that cannot be undone
(evict, move, drain of a tier) need a confirmation: --yes, or an answer at the terminal.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvstore.errors import DataLoss, InvalidRequest
from kvstore.units import parse_duration
from kvstore.v1alpha import admin_pb2
from kvstore_ops.door import door_of
from kvstore_ops.operators import tables
from kvstore_ops.operators.calls import Operator
from kvstore_ops.operators.chains import ContextsOption, LastDigestOption, chains_of
from kvstore_ops.operators.draining import drain_service
from kvstore_ops.operators.reading import (
    DigestOption,
    ModelOption,
    OlderOption,
    PromptOption,
    TierOption,
    TokenizerOption,
    operator,
)
from kvstore_ops.operators.words import wanted_of
from kvstore_ops.options import (
    EXIT_CODES,
    NOT_ALL,
    NOT_CONFIRMED,
    NOT_FOUND,
    AddressOption,
    JsonOption,
    TenantOption,
    TlsOption,
    of_option,
)

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Change nothing: say what it would come to.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask. A script has to say so.")]
AllOption = Annotated[bool, typer.Option("--all", help="Everything that this tenant has.")]
NOT_DONE = {
    "held", "held by a pin", "kept for what hangs on it", "failed", "not tried", "no room", "no tier answers",
    "has nowhere slower to go", "model not registered", "still being stored", "in memory alone",
}  # fmt: skip
"""Outcomes of chunks that a command could not change as it was told. The command then ends with a code of its own."""


def evict(
    model: ModelOption = "",
    digest: DigestOption = "",
    tier: Annotated[str, typer.Option("--tier", help="Only this tier's copies: memory or nvme.")] = "",
    older_than: OlderOption = "",
    prompt: PromptOption = None,
    tokenizer: TokenizerOption = "",
    everything: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Remove chunks: of a model, a prompt, a tier, or older than some time. Held and pinned chunks stay.

    The chunks that extend a removed chunk are removed with it, because no lookup could find them any more. Chunks that
    the service had acknowledged as durable are counted.

    Example: kvstore evict --model my-model --older-than '2 d' --dry-run
    """
    with operator(address, tenant, tls) as asked:
        wanted = wanted_of(asked, model, digest, tier, older_than, prompt, tokenizer, everything=everything)
        request = admin_pb2.ChangeRequest(selection=wanted, evict=admin_pb2.Evict())
        _change(asked, request, dry_run=dry_run, yes=yes, as_json=as_json, is_dangerous=True)


def pin(
    model: ModelOption = "",
    digest: DigestOption = "",
    tier: TierOption = "",
    prompt: PromptOption = None,
    tokenizer: TokenizerOption = "",
    duration: Annotated[str, typer.Option("--for", help="For so long, like '2 h'; else until they are unpinned.")] = "",
    dry_run: DryRunOption = False,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Protect chunks, and their ancestors, from eviction. Either all selected chunks are pinned, or none.

    A pin outlives this command. It ends by `kvstore unpin`, and after --for. A restart keeps it for a chunk that is on
    the device. limits.pin_bytes_max bounds all pins of a tenant. Ends with 3 where none of the chunks is stored.

    Example: kvstore pin --model my-model --prompt system-prompt.json --for '8 h'
    """
    seconds = int(of_option("--for", parse_duration, duration)) if duration else 0
    if duration and not seconds:
        raise InvalidRequest(f"--for {duration}: use a second or more")
    with operator(address, tenant, tls) as asked:
        wanted = wanted_of(
            asked, model, digest, tier, "", prompt, tokenizer, options="--model, --digest, --tier, or --prompt"
        )
        request = admin_pb2.ChangeRequest(selection=wanted, pin=admin_pb2.Pin(seconds=seconds))
        became = _change(asked, request, dry_run=dry_run, as_json=as_json)
    if not (dry_run or any(each.what == "pinned" for each in became.outcomes)):
        raise typer.Exit(NOT_FOUND)


def unpin(
    model: ModelOption = "",
    digest: DigestOption = "",
    prompt: PromptOption = None,
    tokenizer: TokenizerOption = "",
    everything: AllOption = False,
    dry_run: DryRunOption = False,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """End pins. Ancestors of chunks that are still pinned stay held.

    Example: kvstore unpin --all
    """
    with operator(address, tenant, tls) as asked:
        wanted = wanted_of(
            asked, model, digest, "", "", prompt, tokenizer,
            everything=everything, options="--model, --digest, --prompt, or --all",
        )  # fmt: skip
        request = admin_pb2.ChangeRequest(selection=wanted, unpin=admin_pb2.Unpin())
        _change(asked, request, dry_run=dry_run, as_json=as_json)


def move(
    to: Annotated[str, typer.Option("--to", help="The tier: memory, nvme, redis or s3.")],
    model: ModelOption = "",
    digest: DigestOption = "",
    tier: TierOption = "",
    older_than: OlderOption = "",
    prompt: PromptOption = None,
    tokenizer: TokenizerOption = "",
    keep: Annotated[bool, typer.Option("--keep", help="Copy: faster tiers give nothing up.")] = False,
    everything: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Move chunks to a slower tier, and remove them from the faster tiers; or bring chunks into memory.

    Shared tiers take whole chunks only: the last, short chunk of a prompt stays, and is found again when the others are
    back. Faster tiers remove a chunk only when the slower tier has it for certain.

    Example: kvstore move --model my-model --to s3 --yes
    """
    with operator(address, tenant, tls) as asked:
        wanted = wanted_of(asked, model, digest, tier, older_than, prompt, tokenizer, everything=everything)
        request = admin_pb2.ChangeRequest(selection=wanted, move=admin_pb2.Move(tier=to, keep=keep))
        is_dangerous = not keep and to not in ("memory", "dram")
        _change(asked, request, dry_run=dry_run, yes=yes, as_json=as_json, is_dangerous=is_dangerous)


def prefetch(
    model: Annotated[
        str, typer.Option("--model", help="A model's id, its last part, or 8 digits of its fingerprint.")
    ] = "",
    prompt: ContextsOption = None,
    digest: LastDigestOption = "",
    tokenizer: TokenizerOption = "",
    dry_run: DryRunOption = False,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Bring a prompt's stored prefix into memory, as a fetch would. What became of several contexts is told together.

    Example: kvstore prefetch --model my-model --prompt prompt.json
    """
    with operator(address, tenant, tls) as asked:
        chains = chains_of(asked, model, prompt, digest, tokenizer)
        requests = [
            admin_pb2.ChangeRequest(prefetch=admin_pb2.Prefetch(query=each.query), dry_run=dry_run) for each in chains
        ]
        found = tables.outcomes_together([followed(asked, each) for each in requests])
    tell(found, dry_run=dry_run, as_json=as_json)


def verify(
    model: ModelOption = "",
    digest: DigestOption = "",
    tier: Annotated[str, typer.Option("--tier", help="Only this tier's copies.")] = "",
    older_than: OlderOption = "",
    prompt: PromptOption = None,
    tokenizer: TokenizerOption = "",
    dry_run: DryRunOption = False,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Read copies again and check every strip; without an option, of all copies. Damaged copies are quarantined.

    A chunk that memory still has is written again. Ends with 8 when damage was found.

    Example: kvstore verify --tier nvme
    """
    with operator(address, tenant, tls) as asked:
        wanted = wanted_of(asked, model, digest, tier, older_than, prompt, tokenizer, everything=True)
        request = admin_pb2.ChangeRequest(selection=wanted, verify=admin_pb2.Verify())
        _change(asked, request, dry_run=dry_run, as_json=as_json)


def drain(
    tier: Annotated[str, typer.Option("--tier", help="The tier to empty; none: write all that waits.")] = "",
    service: Annotated[bool, typer.Option("--service", help="Take no more stores, and write all that waits.")] = False,
    end: Annotated[bool, typer.Option("--end", help="Have the tier take chunks again, or the service stores.")] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Move all chunks of a tier to slower tiers, and have it take no more; or write all waiting chunks.

    Chunks without a slower tier stay: `kvstore evict --tier` removes them. With --service stores are refused first, of
    all tenants where no --tenant is named (--json: a document for each, with its name), and 0 says that the service can
    be stopped and loses nothing. A restart ends the draining.

    Example: kvstore drain --tier nvme --yes
    """
    if end and not (tier or service):
        raise InvalidRequest("--end needs --tier or --service: what is to take chunks again?")
    if tier and service:
        raise InvalidRequest("--service drains all tiers: say no --tier")
    request = admin_pb2.ChangeRequest(
        selection=admin_pb2.Selection(tier=tier), drain=admin_pb2.Drain(end=end, service=service)
    )  # fmt: skip
    if service:
        change = partial(_change, yes=yes, dry_run=dry_run, as_json=as_json, is_dangerous=not end)
        drain_service(door_of(address, tenant, tls), request, change, is_whole=not tenant)
        return
    with operator(address, tenant, tls) as asked:
        is_dangerous = bool(tier) and not end
        _change(asked, request, dry_run=dry_run, yes=yes, as_json=as_json, is_dangerous=is_dangerous)


def _change(
    asked: Operator, request: admin_pb2.ChangeRequest, *, dry_run: bool, as_json: bool, yes: bool = True,
    is_dangerous: bool = False, tenant: str = "",
) -> admin_pb2.ChangeResponse:  # fmt: skip
    """Make a change or its dry run, print the outcome, and return it; ask before a dangerous one. ``tenant``: whose it
    is, where those of several are printed. Raises typer.Exit as ``tell`` does."""
    if is_dangerous and not dry_run and not yes:
        request.dry_run = True
        planned = followed(asked, request)  # a name that is not there is told before --yes is asked for
        if not _is_at_terminal():
            typer.echo(
                "kvstore: this removes copies, or refuses stores: say --yes, or look first with --dry-run", err=True
            )
            raise typer.Exit(NOT_CONFIRMED)
        Console(stderr=as_json).print(tables.render_outcomes(planned, dry_run=True, nothing=_nothing(request)))
        if not _is_confirmed():
            raise typer.Exit(NOT_CONFIRMED)
    request.dry_run = dry_run
    became = followed(asked, request)
    tell(became, dry_run=dry_run, as_json=as_json, nothing=_nothing(request), tenant=tenant)
    return became


def _nothing(request: admin_pb2.ChangeRequest) -> str:
    """Return the line of a change that met no chunk."""
    if request.drain.end:
        what = "stores are taken" if request.drain.service else f"{request.selection.tier} takes chunks"
        return f"nothing else: {what} again"
    if request.WhichOneof("change") == "drain":
        tier = request.selection.tier
        return f"nothing to move: {tier} takes no more" if tier else "nothing: no chunk waits to be written"
    is_pin = request.WhichOneof("change") == "pin"
    return "nothing is pinned: none of these is stored" if is_pin else "nothing: no chunk is meant"


def _is_at_terminal() -> bool:
    return sys.stdin.isatty()


def _is_confirmed() -> bool:
    """Ask at the terminal; its end, or an interrupt, is a no. The answer to --json alone goes to standard output."""
    try:
        return typer.confirm("Go on?", err=True)
    except typer.Abort:
        return False


def tell(
    found: admin_pb2.ChangeResponse, *, dry_run: bool, as_json: bool, nothing: str = "nothing: no chunk is meant",
    tenant: str = "",
) -> None:  # fmt: skip
    """Print what became of all chunks; ``nothing``: where there is none. Raises typer.Exit with a code of its own when
    not everything was done."""
    if as_json:
        whose = {"tenant": tenant} if tenant else {}
        print(json.dumps({**whose, **tables.outcomes_as_dict(found, dry_run=dry_run)}, indent=2))
    else:
        Console().print(tables.render_outcomes(found, dry_run=dry_run, nothing=nothing))
    words = {each.what for each in found.outcomes if each.chunk_count}
    if dry_run:
        return
    if any(each.endswith(": damaged") for each in words):
        raise typer.Exit(EXIT_CODES[DataLoss])
    if words & NOT_DONE or any(each.endswith(": not read") for each in words):
        raise typer.Exit(NOT_ALL)


def followed(asked: Operator, request: admin_pb2.ChangeRequest) -> admin_pb2.ChangeResponse:
    """Make a change with a progress bar on a terminal, and return its last message."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    last = admin_pb2.ChangeResponse()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(request.WhichOneof("change") or "", total=None)
        for last in asked.change(request):
            progress.update(bar, completed=last.done_count, total=last.total_count)
    return last


def reload(
    dry_run: DryRunOption = False,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Have the sidecar read its settings again, from the file, flags and environment that it was started with.

    Limits, the log level and the rates of checks change at once. Other changed settings are listed, and need a restart.
    When a source cannot be read, the error is printed, and nothing changes.

    Example: kvstore reload --dry-run
    """
    if door_of(address, tenant, tls).socket is None:
        raise InvalidRequest(f"--address {address}: settings are reloaded on the sidecar's own host, by its socket")
    with operator(address, tenant, tls) as asked:
        changes = asked.reload(dry_run=dry_run)
    if as_json:
        print(json.dumps(tables.settings_as_dict(changes, dry_run=dry_run), indent=2))
    else:
        Console().print(tables.render_settings(changes, dry_run=dry_run))


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    for command in (evict, pin, unpin, move, prefetch, verify, drain, reload):
        app.command()(command)
