"""``kvstore plan``: the fastest way to a prompt's first token, with the known speeds or with supposed ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvstore.errors import InvalidRequest
from kvstore.keys import fingerprint
from kvstore.planning import Recompute
from kvstore.planning.loading import (
    ComputeRate,
    LoadFacts,
    LoadPlan,
    Operations,
    TierFacts,
    TierRate,
    Way,
    plan_loading,
)
from kvstore.planning.profile import Origin
from kvstore.spec import ModelSpec, Tier
from kvstore.units import format_bytes, parse_bytes
from kvstore.v1alpha import admin_pb2
from kvstore_ops.operators.harmless import cell, plain
from kvstore_ops.options import AddressOption, JsonOption, TenantOption, TlsOption, of_option
from kvstore_ops.tier_words import tier_words

if TYPE_CHECKING:
    from kvstore_client import Client

WIDTH = 48
"""Width of a picture's time axis in characters."""
MEMORY = "memory"
SLOWEST_PER_S, FASTEST_PER_S = 1e-3, 1e9
"""Bounds of the tokens per second that an engine may compute."""
TIERS = {tier.name.lower(): tier for tier in (Tier.NVME, Tier.REDIS, Tier.S3)}
UNMEASURED = (
    "No engine has told the sidecar how fast it computes this model (those that plan do, every ten seconds at most): "
    "give --prefill-tokens-per-s. Without it seconds mean nothing."
)


def plan(
    model: Annotated[str, typer.Option("--model", help="A model's id, its last part, or 8 digits of its fingerprint.")],
    prompt: Annotated[Path, typer.Option("--prompt", help="JSON token ids; text with --tokenizer.")],
    tokenizer: Annotated[str, typer.Option(help="transformers' tokenizer: a directory or a name.")] = "",
    prefill_tokens_per_s: Annotated[
        float,
        typer.Option(help="How fast the engine computes a prompt without a context; 0: as engines told.", min=0.0),
    ] = 0.0,
    step_tokens: Annotated[int, typer.Option(help="Rows of one forward pass; 0: all at once.", min=0)] = 0,
    rate: Annotated[
        list[str] | None,
        typer.Option(help="What if: TIER=BYTES a second, like nvme=200MB; 'memory' is the way from memory."),
    ] = None,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the fastest way to a prompt's first token: the tokens to load, the tokens to compute, and the reason.

    Example: kvstore plan --model my-model --prompt prompt.json --prefill-tokens-per-s 2000 --rate nvme=200MB
    """
    from kvstore_ops import locate
    from kvstore_ops.door import door_of

    (tokens, *more) = locate.read_tokens(prompt, tokenizer)
    if more:
        raise InvalidRequest(f"--prompt {prompt}: one context is planned at a time")
    with door_of(address, tenant, tls).open() as client:
        spec = locate.model_named(client, model)
        match = client.lookup(spec, tokens)
        facts = client.planner.facts(spec, match, len(tokens), len(tokens) - 1, step_tokens, frozenset(Way))
        facts = replace(facts, compute=told_compute(client.stats().engines, spec, step_tokens))
        reuse = {origin.value: documents(client, spec, origin) for origin in (Origin.STANDALONE, Origin.PREAMBLE)}
    facts = supposed(facts, spec, prefill_tokens_per_s, rate or [])
    found = plan_loading(facts)
    if as_json:
        print(json.dumps({**as_dict(facts, found), "documents": reuse}, indent=2))
        return
    Console().print(render(facts, found))
    for origin, said in reuse.items():
        Console().print(Text(plain(f"documents ({origin}): {said}")))


def documents(client: Client, spec: ModelSpec, origin: Origin) -> str:
    """Return in words how documents of a model may be reused, by a profile of this host or of the service."""
    permit = client.gate.permit(spec, None, "position", origin)
    if permit.setting is None:
        return permit.reason
    share = permit.setting.share(spec.layer_count)
    return f"reused at {share:.0%} of the compute, at a floor of {client.gate.floor:g}: {again(permit.setting)}"


def told_compute(engines: Iterable[admin_pb2.EngineRate], spec: ModelSpec, step_tokens: int) -> ComputeRate:
    """Return the compute rate that an engine reported to the sidecar for this model; an unknown rate when none did."""
    from kvstore_client.loading.planner import told_engines

    return told_engines(engines).get((fingerprint(spec, spec.kind), step_tokens)) or ComputeRate()


def supposed(facts: LoadFacts, spec: ModelSpec, prefill_tokens_per_s: float, rates: Sequence[str]) -> LoadFacts:
    """Return the facts with the speeds of the options. Raises InvalidRequest naming the option."""
    if prefill_tokens_per_s:
        if not SLOWEST_PER_S <= prefill_tokens_per_s <= FASTEST_PER_S:
            raise InvalidRequest(
                f"--prefill-tokens-per-s {prefill_tokens_per_s} must be in {SLOWEST_PER_S:g}..{FASTEST_PER_S:g}"
            )
        token_s = 1.0 / prefill_tokens_per_s
        share = Operations.of(spec).pair_share
        facts = replace(facts, compute=ComputeRate(0.0, token_s, token_s * share, caution=1.0, sample_count=1))
    tiers = dict(facts.tiers)
    for text in rates:
        name, _, size = text.partition("=")
        bytes_per_s = of_option(f"--rate {text}", parse_bytes, size.removesuffix("/s")) if size else 0
        if bytes_per_s <= 0 or (name not in TIERS and name != MEMORY):
            raise InvalidRequest(f"--rate {text}: use TIER=BYTES like nvme=200MB; tiers: {', '.join([MEMORY, *TIERS])}")
        if name == MEMORY:
            facts = replace(facts, link=TierRate(0.0, 1.0 / bytes_per_s, 1.0))
            continue
        known = tiers.get(TIERS[name])
        latency_s = known.rate.latency_s if known is not None else 0.0
        tiers[TIERS[name]] = TierFacts(TierRate(latency_s, 1.0 / bytes_per_s, 1.0))
    return replace(facts, tiers=tiers)


def as_dict(facts: LoadFacts, found: LoadPlan) -> dict[str, Any]:
    """Return the plan as plain values for JSON."""
    return {
        "token_count": found.token_count,
        "chosen": asdict(found.chosen),
        "why": found.why,
        "is_measured": found.is_measured,
        "candidates": [asdict(each) for each in found.candidates],
        "stored": [
            {"form": stock.form, "tier": run.tier.name, "token_count": run.token_count, "token_bytes": run.token_bytes}
            for stock in facts.stocks
            for run in stock.runs
        ],
        "bars": [asdict(bar) for bar in found.chosen.bars],
    }


def render(facts: LoadFacts, found: LoadPlan) -> Group:
    """Draw the stored runs and their tiers, the candidates, and a picture of the chosen one."""
    stored = Table("stored tokens", "as", "in", "a second", title=f"{found.token_count:,} tokens")
    for stock in facts.stocks:
        for run in stock.runs:
            known = facts.tiers.get(run.tier)
            rate = facts.link if known is None else known.rate
            speed = f"{format_bytes(int(rate.bytes_per_s))}{'' if rate.sample_count else ' (assumed)'}"
            stored.add_row(f"{run.token_count:,}", stock.form, tier_words(run.tier.name.lower()), speed)
    if not facts.stocks:
        stored.add_row("none", "", "", "")
    ways = Table("", "way", "loads", "first token", "in one case of ten", "computes", "tiers busy", "not, because")
    for each in found.candidates:
        loads = f"{each.load_start:,} to {each.load_stop:,}" if each.loaded_tokens else "nothing"
        times = (each.ttft_s, each.ttft_high_s, each.compute_s, each.tier_s)
        mark = "*" if each is found.chosen else ""
        ways.add_row(mark, each.way, loads, *(f"{seconds * 1e3:,.1f} ms" for seconds in times), cell(each.refused))
    lines: list[Table | Text] = [stored, ways, Text(str(found)), *map(Text, picture(found))]
    if not found.is_measured:
        lines.append(Text(UNMEASURED, style="yellow"))
    return Group(*lines)


def again(setting: Recompute) -> str:
    """Return in words what a setting computes again."""
    group = f"layers {setting.first_layer} to {setting.last_layer}" * (setting.check_layer > setting.first_layer)
    chosen = f"{setting.ratio:.0%} by {setting.selector}" * bool(setting.ratio)
    return ", ".join(filter(None, (group, chosen))) or "nothing is computed again"


def picture(found: LoadPlan) -> list[str]:
    """Draw the activities from the request to the first token, a line each."""
    chosen = found.chosen
    if not chosen.ttft_s:
        return []
    lines = []
    for bar in chosen.bars:
        start, stop = (round(place / chosen.ttft_s * WIDTH) for place in (bar.start_s, bar.stop_s))
        drawn = " " * start + "#" * max(1, min(stop, WIDTH) - start)
        lines.append(f"{bar.name:>18} |{drawn:<{WIDTH}}| {(bar.stop_s - bar.start_s) * 1e3:,.1f} ms")
    return lines


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command()(plan)
