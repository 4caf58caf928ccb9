"""The ``kvstore`` command. An error is one clear line. Commands that print a table take ``--json``."""

from __future__ import annotations

import errno
import json
import pkgutil
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvstore import __version__
from kvstore.config import DEFAULT_TENANT
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.telemetry.logs import drop_output
from kvstore_ops.commands import Commands
from kvstore_ops.options import (
    OUTPUT_LOST,
    AddressOption,
    ConfigOption,
    JsonOption,
    TenantOption,
    TlsOption,
    failed,
    load_settings,
    of_option,
)

NO_OUTPUT = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE}
"""Errors of a write that say that its file takes no more."""

app = typer.Typer(
    cls=Commands,
    help="Keep KV caches of LLM engines: run the sidecar, and ask it what it has.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def about(
    _version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keep KV caches of LLM engines: run the sidecar, and ask it what it has.

    `kvstore --install-completion` has the shell complete commands and options.
    """


@app.command()
def serve(
    config: ConfigOption = None,
    state_directory: Annotated[Path | None, typer.Option(help="Where the service keeps its state.")] = None,
    socket_directory: Annotated[Path | None, typer.Option(help="Where its sockets are made.")] = None,
    capacity: Annotated[str | None, typer.Option(help="Arena size, like '8 GiB'.")] = None,
    nvme: Annotated[str | None, typer.Option(help="Device tier size, like '64 GiB'; 0: none.")] = None,
    nvme_directory: Annotated[Path | None, typer.Option(help="Where the device tier's files lie.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Port of the metrics page.")] = None,
    log_format: Annotated[str | None, typer.Option(help="json or text.")] = None,
) -> None:
    """Run the sidecar until it is told to stop.

    Example: kvstore serve --capacity '8 GiB' --nvme '64 GiB'
    """
    from kvstore.server.app import serve as run

    flags: dict[str, object] = {
        "server.state_directory": state_directory,
        "server.socket_directory": socket_directory,
        "arena.capacity_bytes": capacity,
        "tiers.nvme.capacity_bytes": nvme,
        "tiers.nvme.directory": nvme_directory,
        "server.metrics_port": metrics_port,
        "server.log_format": log_format,
    }
    try:
        status = run(load_settings(config, flags))
    except KVStoreError as error:
        print(f"kvstore: {error.message}", file=sys.stderr)
        raise typer.Exit(1) from error
    raise typer.Exit(status)


@app.command("config")
def show_config(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print every setting, its value and where it came from.

    Example: kvstore config --config kvstore.toml
    """
    rows = load_settings(config).rows()
    if as_json:
        told = {name: {"value": value, "origin": origin} for name, value, origin in rows}
        print(json.dumps(told, indent=2, default=str))  # paths, as text
        return
    columns = (Column("setting", no_wrap=True), Column("value", overflow="fold"), Column("from", overflow="fold"))
    table = Table(*columns)
    for name, value, origin in rows:
        shown = str(value).lower() if isinstance(value, bool) else str(value)  # as a file has it
        table.add_row(name, Text(shown), Text(origin), style=None if origin == "default" else "bold")
    Console().print(table)


@app.command()
def status(
    address: AddressOption = None, tenant: TenantOption = "", tls: TlsOption = "", as_json: JsonOption = False
) -> None:
    """Show the contents and counters of the sidecar: of the default tenant, with a line per other one, or of --tenant.

    Example: kvstore status --json
    """
    from kvstore_ops import tenants
    from kvstore_ops.door import door_of
    from kvstore_ops.message_fields import as_fields
    from kvstore_ops.status import render

    door = door_of(address, tenant, tls)
    with door.open() as client:
        stats = client.stats()
    is_default = not tenant and stats.tenant == DEFAULT_TENANT
    others = tenants.ask(tenants.beside(door)) if is_default else {}
    if is_default and (problem := tenants.unseen(door)):
        print(f"kvstore: {problem}", file=sys.stderr)
    if as_json:
        found = {name: {"problem": each} if isinstance(each, str) else as_fields(each) for name, each in others.items()}
        print(json.dumps({**as_fields(stats), "tenants": found}, indent=2))
        return
    Console().print(render(stats))
    if others:
        Console().print(tenants.render({stats.tenant: stats, **others}))


@app.command()
def watch(
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    count: Annotated[int, typer.Option(help="End after so many events; 0: until interrupted.", min=0, max=1 << 30)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print chunks as they are stored, removed and moved.

    Example: kvstore watch --count 10
    """
    from kvstore_ops.door import door_of
    from kvstore_ops.watch import follow

    with door_of(address, tenant, tls).open() as client, client.watch() as events:
        follow(events, count, as_json=as_json)


@app.command()
def locate(
    model: Annotated[
        str, typer.Option("--model", help="A model's id, its last part, or 8 digits of its fingerprint.")
    ] = "",
    prompt: Annotated[
        Path | None, typer.Option("--prompt", help="JSON token ids, one context or a list; text with --tokenizer.")
    ] = None,
    digest: Annotated[
        str, typer.Option("--digest", help="Instead of --prompt: the first digits of the prefix's last chunk.")
    ] = "",
    tokenizer: Annotated[str, typer.Option(help="A directory with a transformers tokenizer, or its cached name.")] = "",
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show where a prompt's prefix is: on which nodes, in which tiers, how far.

    Example: kvstore locate --model my-model --prompt prompt.json
    """
    from kvstore_ops import locate as located
    from kvstore_ops.door import door_of

    with door_of(address, tenant, tls).open() as client:
        found, counts = located.find(client, model, prompt, digest, tokenizer)
    if as_json:
        print(json.dumps([located.as_dict(*each) for each in zip(found, counts, strict=True)], indent=2))
        return
    Console().print(located.render(found, counts))


def _benchmarks() -> list[str]:
    import kvstore_ops.bench as bench

    modules = {module.name for module in pkgutil.iter_modules(bench.__path__)} - bench.SHARED
    names = {module: name for name, module in bench.MODULES.items()}
    return sorted({names.get(module, module).replace("_", "-") for module in modules} - bench.BESIDE)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="A benchmark, or 'all'; 'list' names them.")],
    quick: Annotated[bool, typer.Option("--quick", help="Same definitions, fewer bytes: within 45 s.")] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A few seconds: proves that it runs; its figures say nothing.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the results here, with commit and machine.")
    ] = None,
) -> None:
    """Measure a figure beside its limit, in the same run. The last line is JSON.

    Example: kvstore bench fetch --quick
    """
    from kvstore_ops.bench import BESIDE, GPU
    from kvstore_ops.bench.alone import import_costly, in_own_process
    from kvstore_ops.bench.card import has_gpu
    from kvstore_ops.bench.origin import origin
    from kvstore_ops.bench.result import verdict_line

    known = _benchmarks()
    if name == "list":
        print("\n".join([*known, *BESIDE]))
        return
    if name != "all" and name not in [*known, *BESIDE]:
        raise InvalidRequest(f"no benchmark {name!r}; known: {', '.join([*known, *BESIDE])}")
    scale = "tiny" if tiny else "quick" if quick else "full"
    if json_path and not json_path.absolute().parent.is_dir():
        raise InvalidRequest(f"--json {json_path}: there is no directory {json_path.parent} to write it into")
    told, results = origin(scale), []
    if name == "all":
        import_costly()
        known = [each for each in known if tiny or each not in GPU or has_gpu()]
    for each in known if name == "all" else [name]:
        result = in_own_process(each, scale)
        results.append(result)
        print(verdict_line(result))
        print(json.dumps(result), flush=True)
    if json_path:
        json_path.write_text(json.dumps({**told, "results": results}, indent=2) + "\n", encoding="utf-8")


@app.command()
def profile(
    receiver: Annotated[str | None, typer.Argument(help="The model that reuses: one of the testbed's.")] = None,
    model: Annotated[Path | None, typer.Option(help="Instead: a directory with a transformers model.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="With --model: JSON lines, as docs/profile.md has them.")] = None,
    sender: Annotated[
        str | None, typer.Option(help="Whose caches it reuses: a sibling, or its directory. None: its own.")
    ] = None,
    reuse: Annotated[
        str | None, typer.Option(help="position, sibling or both (default: what the sender says).")
    ] = None,
    contexts: Annotated[
        int | None,
        typer.Option(
            help="How many to measure on (default: 256), half as many more to search on; of --prompts (default: all) "
            "a third is to search on.",
            min=1,
        ),
    ] = None,
    answer_tokens: Annotated[int, typer.Option(help="With --model: tokens of each answer to agree on.", min=1)] = 16,
    rounds: Annotated[int, typer.Option(help="Refinements around the frontier.", min=0)] = 3,
    floor: Annotated[float, typer.Option(help="Share of full prefill's quality to mark the choice at.")] = 0.99,
    seeds: Annotated[str, typer.Option(help="Whose contexts; evaluation seeds are refused.")] = "calibration",
    out: Annotated[Path | None, typer.Option(help="The profile (default: where clients look).")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, whatever was measured.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the quality and cost of recompute settings for a pair of models. A killed run continues where it ended.

    Example: kvstore profile l6-s2
    """
    from kvstore_ops.profiling.command import Own, run

    if (receiver is None) == (model is None) or (model is None) != (prompts is None):
        raise InvalidRequest("give a model of the testbed, or --model DIR and --prompts FILE")
    whose: str | Own = receiver or ""
    if model is not None and prompts is not None:
        whose = Own(model, prompts, None if sender is None else Path(sender), answer_tokens)
    run(whose, sender, reuse, contexts, rounds, floor, seeds, out, fresh=fresh, as_json=as_json)


@app.command()
def scan(
    config: ConfigOption = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read all bytes, not headers alone.")] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete what is named; says what it would, without --yes.")
    ] = False,
    tenant: Annotated[str, typer.Option(help="Only this tenant's: its name, or its digest's first digits.")] = "",
    model: Annotated[
        str, typer.Option(help="Only this model's: its id, where a sidecar here knows it, or its first digits.")
    ] = "",
    older_than: Annotated[str, typer.Option("--older-than", help="Only what was written before, like '30 d'.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run/--yes", help="Whether --delete only says what it would.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Show the chunks in the bucket of tiers.s3 by tenant, model and age, and count the damaged. Delete on demand.

    Example: kvstore scan --config kvstore.toml --older-than '30 d' --delete
    """
    from kvstore.seams import SystemClock
    from kvstore.units import parse_duration
    from kvstore_ops import scan as scanning

    if not (delete or dry_run):
        raise InvalidRequest("--yes goes with --delete: what is to be deleted?")
    if delete and not (tenant or model or older_than):
        raise InvalidRequest("--delete needs to know what: give --tenant, --model or --older-than (0 s: everything)")
    settings, now_s, is_real = load_settings(config).settings, SystemClock().wall(), delete and not dry_run
    age_s = of_option("--older-than", parse_duration, older_than) if older_than else 0.0
    wanted = scanning.wanted_of(settings, tenant, model, age_s, is_for_deletion=delete)
    found = scanning.with_progress(
        lambda tell: scanning.scan(settings, wanted, verify=verify, delete=is_real, now_s=now_s, progress=tell)
    )
    if as_json:
        print(json.dumps({**found.as_dict(), "verified": verify, "dry_run": delete and dry_run}, indent=2))
        return
    Console().print(scanning.render(found, now_s, is_verified=verify))
    if is_real:
        print(f"deleted: {found.deleted_count:,} objects")
    elif delete:
        print(f"would delete {found.object_count - found.newer_count:,} objects: say --yes")


@app.command()
def demo() -> None:
    """Show a repeated prompt in front of a real model, cold and warm.

    Example: kvstore demo
    """
    from kvstore_ops.demo import main as run

    raise typer.Exit(run())


@app.command()
def version() -> None:
    """Print the version.

    Example: kvstore version
    """
    print(__version__)


@cache
def command() -> Any:  # typer's type of it is private
    """Return all commands, built once: a process that forks others builds them for these."""
    return typer.main.get_command(app)


def main() -> None:
    """The console entry point."""
    code: str | int | None = 0
    try:
        try:
            command()()
        except SystemExit as ended:
            is_lost = isinstance(ended.__context__, BrokenPipeError)  # typer and rich end with 1 then, as after a bug
            code = OUTPUT_LOST if is_lost else ended.code
        except KVStoreError as error:
            code = failed(error)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where its failure can still be told in a line
    except OSError as error:
        if error.errno not in NO_OUTPUT or error.filename is not None:
            raise
        drop_output()
        if error.errno != errno.EPIPE:  # who closes a pipe early wants no more
            print(f"kvstore: the output cannot be written: {error.strerror}", file=sys.stderr)
        code = code or OUTPUT_LOST  # what went wrong before says more
    sys.exit(code)


if __name__ == "__main__":
    from kvstore_ops import cli  # one that was imported before is used again

    cli.main()
