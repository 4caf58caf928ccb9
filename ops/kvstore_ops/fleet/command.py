"""``kvstore fleet``: the gain of loading plans for a fleet, by a trace of its requests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvstore.errors import InvalidRequest
from kvstore.planning.loading import ComputeRate, TierRate
from kvstore.spec import Tier
from kvstore.units import format_bytes, parse_bytes
from kvstore_ops.fleet.hardware import Hardware
from kvstore_ops.fleet.simulation import Fleet, FleetReport
from kvstore_ops.fleet.trace import read_trace
from kvstore_ops.options import JsonOption, of_option

FIELDS = {"memory": "link", "nvme": "device", "shared": "shared"}
"""Names in ``--rate`` of the fields of ``Hardware``."""
CALLED = {Tier.DRAM: "memory", Tier.NVME: "nvme", Tier.S3: "shared"}
ENGINES_MAX = 1024


def fleet(
    trace: Annotated[Path, typer.Argument(help="JSON lines with timestamp (ms), input_length and hash_ids.")],
    requests: Annotated[int | None, typer.Option(help="Only the first so many.", min=1)] = None,
    engines: Annotated[int, typer.Option(help="Engines on all nodes together.", min=1, max=ENGINES_MAX)] = 8,
    nodes: Annotated[int, typer.Option(help="Nodes; each has as many engines.", min=1, max=ENGINES_MAX)] = 2,
    prefill_tokens_per_s: Annotated[float, typer.Option(help="Speed of one engine at a prompt's beginning.")] = 8000.0,
    rate: Annotated[
        list[str] | None, typer.Option(help="memory=, nvme= or shared=BYTES, a second; may be repeated.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Memory of each node's sidecar.")] = "64 GiB",
    nvme: Annotated[str, typer.Option(help="Device room of each node's sidecar.")] = "1024 GiB",
    token_bytes: Annotated[int, typer.Option(help="A token's cache in all layers.", min=1)] = 131072,
    block_tokens: Annotated[int, typer.Option(help="Tokens of each of hash_ids.", min=1)] = 512,
    as_json: JsonOption = False,
) -> None:
    """Simulate a fleet on a trace: first tokens and bytes moved, with plans, with all loaded, and without a cache.

    Example: kvstore fleet trace.jsonl --engines 8 --nodes 2 --rate shared=1GB
    """
    if nodes > engines:
        raise InvalidRequest(f"--nodes {nodes}: each node has an engine, so at most --engines {engines}")
    if not 1 <= prefill_tokens_per_s <= 1e9:
        raise InvalidRequest(f"--prefill-tokens-per-s {prefill_tokens_per_s} must be in 1..1e9")
    own = Hardware()
    share = own.compute.pair_s / own.compute.token_s
    token_s = 1 / prefill_tokens_per_s
    hardware = replace(
        own, engines=engines, nodes=nodes, token_bytes=token_bytes, block_tokens=block_tokens,
        memory_bytes=of_option("--memory", parse_bytes, memory), device_bytes=of_option("--nvme", parse_bytes, nvme),
        compute=ComputeRate(own.compute.pass_s, token_s, share * token_s, 1.0, 1.0, 1), **_rates(own, rate or ()),
    )  # fmt: skip
    found = read_trace(trace, requests)
    reports = {
        way: Fleet(hardware, plans=way == "planned", keeps=way != "plain").run(found)
        for way in ("plain", "loaded", "planned")
    }
    if as_json:
        print(json.dumps({way: as_dict(report) for way, report in reports.items()}, indent=2))
        return
    Console().print(render(hardware, reports))


def _rates(own: Hardware, texts: Sequence[str]) -> dict[str, Any]:
    rates = {}
    for text in texts:
        name, _, size = text.partition("=")
        bytes_per_s = of_option(f"--rate {text}", parse_bytes, size.removesuffix("/s")) if size else 0
        if bytes_per_s <= 0 or name not in FIELDS:
            raise InvalidRequest(f"--rate {text}: use {', '.join(f'{each}=BYTES' for each in FIELDS)}, like nvme=2GB")
        known: TierRate = getattr(own, FIELDS[name])
        rates[FIELDS[name]] = replace(known, byte_s=1 / bytes_per_s)
    return rates


def as_dict(report: FleetReport) -> dict[str, Any]:
    """Return a report as plain values for JSON."""
    return {
        "requests": len(report.ttfts_s),
        "mean_ttft_s": report.mean_ttft_s,
        "p99_ttft_s": report.p99_ttft_s,
        "computed_tokens": report.computed_tokens,
        "loaded_tokens": report.loaded_tokens,
        "read_bytes": _named(report.read_bytes),
        "written_bytes": _named(report.written_bytes),
        "refused_requests": report.refused_requests,
        "refused_bytes": _named(report.refused_bytes),
    }


def _named(counts: Counter[Tier]) -> dict[str, int]:
    return {name: counts[tier] for tier, name in CALLED.items()}


def render(hardware: Hardware, reports: dict[str, FleetReport]) -> Group:
    """Draw the fleets side by side."""
    plain, loaded, planned = fleets = reports["plain"], reports["loaded"], reports["planned"]
    table = Table(
        "", "no cache", "all loaded", "planned",
        title=f"{len(planned.ttfts_s):,} requests, {hardware.engines} engines on {hardware.nodes} nodes",
    )  # fmt: skip
    for name, values in (
        ("mean TTFT", [f"{each.mean_ttft_s:.3f} s" for each in fleets]),
        ("99 of 100 within", [f"{each.p99_ttft_s:.3f} s" for each in fleets]),
        ("tokens computed", [f"{each.computed_tokens:,}" for each in fleets]),
        ("tokens loaded", [f"{each.loaded_tokens:,}" for each in fleets]),
        *((f"read from {name}", [format_bytes(each.read_bytes[tier]) for each in fleets])
          for tier, name in CALLED.items()),
        *((f"written to {name}", [format_bytes(each.written_bytes[tier]) for each in fleets])
          for tier, name in CALLED.items() if tier is not Tier.DRAM),
        *((f"not asked of {name}", [format_bytes(each.refused_bytes[tier]) for each in fleets])
          for tier, name in CALLED.items()),
        ("requests of which a part was not loaded", [f"{each.refused_requests:,}" for each in fleets]),
    ):  # fmt: skip
        table.add_row(name, *values)
    over_loads, over_none = (each.mean_ttft_s / planned.mean_ttft_s for each in (loaded, plain))
    return Group(
        table,
        Text(
            f"First tokens come {over_loads:.2f} times as soon with plans as with all loaded, and {over_none:.2f} "
            "times as soon as without a cache, on average."
        ),
    )


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command()(fleet)
