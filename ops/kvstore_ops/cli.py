"""The ``kvstore`` command. Errors are one clear line; ``--json`` on what prints a table."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvstore import __version__
from kvstore.config import LoadedSettings, load
from kvstore.errors import InvalidRequest, KVStoreError

app = typer.Typer(
    help="A memory for LLM inference: KV caches kept beside any engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
SocketOption = Annotated[str | None, typer.Option("--socket", help="The sidecar's socket (default: the user's).")]
TenantOption = Annotated[str, typer.Option("--tenant", help="One of the sidecar's tenants.")]


def _load(config: Path | None, flags: dict[str, object] | None = None) -> LoadedSettings:
    return load(config, os.environ, flags or {})


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
    """Run the sidecar until it is told to stop."""
    from kvstore.server import serve as run

    flags: dict[str, object] = {
        "server.state_directory": state_directory,
        "server.socket_directory": socket_directory,
        "arena.capacity_bytes": capacity,
        "tiers.nvme.capacity_bytes": nvme,
        "tiers.nvme.directory": nvme_directory,
        "server.metrics_port": metrics_port,
        "server.log_format": log_format,
    }
    raise typer.Exit(run(_load(config, flags)))


@app.command("config")
def show_config(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print every setting, its value and where it came from."""
    rows = _load(config).rows()
    if as_json:
        print(json.dumps({name: {"value": str(value), "origin": origin} for name, value, origin in rows}, indent=2))
        return
    table = Table("setting", "value", "from")
    for name, value, origin in rows:
        table.add_row(name, str(value), origin, style=None if origin == "default" else "bold")
    Console().print(table)


@app.command()
def status(socket: SocketOption = None, tenant: TenantOption = "", as_json: JsonOption = False) -> None:
    """What the sidecar holds and has done: for the default tenant, with a line for each other, or for one of them."""
    from kvstore_client import connect

    from kvstore_ops import tenants
    from kvstore_ops.status import as_dict, render

    with connect(tenants.address_of(socket, tenant)) as client:
        stats = client.stats()
    others = {} if tenant else tenants.ask(socket, tenants.names_beside(socket))
    if as_json:
        found = {name: {"problem": each} if isinstance(each, str) else as_dict(each) for name, each in others.items()}
        print(json.dumps({**as_dict(stats), "tenants": found}, indent=2))
        return
    Console().print(render(stats))
    if others:
        Console().print(tenants.render({stats.tenant: stats, **others}))


@app.command()
def watch(
    socket: SocketOption = None,
    tenant: TenantOption = "",
    count: Annotated[int, typer.Option(help="End after so many events; 0: go on until interrupted.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print chunks as they are stored, removed and moved."""
    from kvstore_client import connect

    from kvstore_ops.tenants import address_of
    from kvstore_ops.watch import follow

    with connect(address_of(socket, tenant)) as client, client.watch() as events:
        follow(events, count, as_json=as_json)


def _benchmarks() -> list[str]:
    import kvstore_ops.bench as bench

    return sorted(
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(bench.__path__)
        if module.name not in bench.SHARED
    )


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="A benchmark, or 'all'; 'list' names them.")],
    quick: Annotated[bool, typer.Option("--quick", help="Same definitions, fewer bytes: within 45 s.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="A few seconds: proves that it runs.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
) -> None:
    """Measure, beside the limit measured in the same run. The last line is JSON."""
    known = _benchmarks()
    if name == "list":
        print("\n".join(known))
        return
    if name != "all" and name not in known:
        raise InvalidRequest(f"no benchmark {name!r}; known: {', '.join(known)}")
    scale = "tiny" if tiny else "quick" if quick else "full"
    results: list[dict[str, Any]] = []
    for each in known if name == "all" else [name]:
        module = importlib.import_module(f"kvstore_ops.bench.{each.replace('-', '_')}")
        result = module.run(scale).as_dict()
        results.append(result)
        print(json.dumps(result), flush=True)
    if json_path:
        json_path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


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
    """Measure what each setting of recompute is worth for a pair of models. A killed run goes on where it was."""
    from kvstore_ops.profiling.command import Own, run

    if (receiver is None) == (model is None) or (model is None) != (prompts is None):
        raise InvalidRequest("give a model of the testbed, or --model DIR and --prompts FILE")
    whose: str | Own = receiver or ""
    if model is not None and prompts is not None:
        whose = Own(model, prompts, None if sender is None else Path(sender), answer_tokens)
    run(whose, sender, reuse, contexts, rounds, floor, seeds, out, fresh=fresh, as_json=as_json)


@app.command()
def demo() -> None:
    """A repeated prompt in front of a real model, cold and warm."""
    from kvstore_ops.demo import main as run

    raise typer.Exit(run())


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """The console entry point."""
    try:
        app()
    except KVStoreError as error:
        print(f"kvstore: {error.message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
