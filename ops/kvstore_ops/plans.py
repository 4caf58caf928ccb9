"""``kvstore plans``: the last partial prefills, with the plan and the outcome of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from kvstore.errors import InvalidRequest
from kvstore.planning.loading import Candidate, LoadPlan, Way
from kvstore.planning.loading.outcome import carried_out, judged
from kvstore.v1alpha import admin_pb2
from kvstore.wire.plans import MODES, plan_from_message
from kvstore_ops.door import door_of
from kvstore_ops.message_fields import as_fields
from kvstore_ops.operators.calls import Operator
from kvstore_ops.operators.harmless import cell, plain
from kvstore_ops.options import AddressOption, JsonOption, TenantOption, TlsOption
from kvstore_ops.planning import again, picture

NONE = 'No plan was made since the sidecar started, or told: clients plan with connect(planning="observe") or "on".'


def plans(
    limit: Annotated[int, typer.Option(help="So many, the newest first; 0: the last 256.", min=0, max=1 << 30)] = 20,
    number: Annotated[int, typer.Option("--number", help="Show this one whole, with its candidates.", min=0)] = 0,
    address: AddressOption = None,
    tenant: TenantOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the last plans (which tokens are loaded and which computed), and the error of their predictions.

    Example: kvstore plans --limit 50
    """
    with door_of(address, tenant, tls).open() as client:
        found = Operator(client).plans(0 if number else limit)
    if number:
        found = [each for each in found if each.number == number]
        if not found:
            raise InvalidRequest(f"--number {number}: no plan that is kept has it: kvstore plans --limit 0 lists them")
    if as_json:
        print(json.dumps([as_fields(each) for each in found], indent=2))
        return
    console = Console()
    if not found:
        console.print(NONE)
    elif number:
        console.print(whole(found[0]))
    else:
        console.print(listed(found))


def listed(found: Sequence[admin_pb2.PlanEntry]) -> Group:
    """Draw a row per plan, and a summary."""
    rows = Table(
        *(Column(name, no_wrap=True) for name in ("plan", "began")), Column("model", overflow="fold"),
        *(Column(name, no_wrap=True, justify="right") for name in ("tokens", "stored")), Column("way", no_wrap=True),
        *(Column(name, no_wrap=True, justify="right") for name in ("loads", "planned\nms", "took\nms", "waited\nms")),
        "became", box=None, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for each in found:
        plan = plan_from_message(each.plan) if each.HasField("plan") else None
        took, waited = (f"{each.end.ttft_seconds * 1e3:,.1f}", f"{each.end.wait_seconds * 1e3:,.1f}")
        rows.add_row(
            str(each.number), f"{datetime.fromtimestamp(each.began_seconds):%H:%M:%S}", cell(each.model_id),
            f"{plan.token_count:,}" if plan else "", f"{each.stored_token_count:,}", plan.chosen.way if plan else "",
            f"{plan.loaded_tokens:,}" if plan else "", _planned(plan),
            *((took, waited) if each.HasField("end") else ("", "")), cell(each.state),
        )  # fmt: skip
    return Group(rows, Text(summary(found)))


def whole(entry: admin_pb2.PlanEntry) -> Group:
    """Draw one plan with all its candidates."""
    lines: list[Any] = [listed([entry])]
    if entry.HasField("plan"):
        plan = plan_from_message(entry.plan)
        ways = Table("", "way", "loads", "first token", "in one case of ten", "not, because")
        for each in plan.candidates:
            loads = loaded(each)
            mark = "*" if each == plan.chosen else ""
            high = f"{each.ttft_high_s * 1e3:,.1f} ms"
            ways.add_row(mark, each.way, loads, f"{each.ttft_s * 1e3:,.1f} ms", high, cell(each.refused))
        lines += [ways, Text(plain(str(plan))), *map(Text, picture(plan))]
    return Group(*lines)


def loaded(candidate: Candidate) -> str:
    """Return in words which tokens a way loads; a blend's stand anywhere, and its setting mends them."""
    if not candidate.loaded_tokens:
        return "nothing"
    if candidate.way is not Way.BLEND:
        return f"{candidate.load_start:,} to {candidate.load_stop:,}"
    setting = candidate.setting
    if setting is None or not (setting.ratio or setting.check_layer > setting.first_layer):
        return f"{candidate.load_stop:,} tokens"
    return f"{candidate.load_stop:,} tokens, again: {again(setting)}"


def summary(found: Sequence[admin_pb2.PlanEntry]) -> str:
    """Return the median error of plans, the time that they saved, and how much later first tokens came than the fastest
    way was planned to, over plans of measured engines that ended. Who only observes loads all that is stored: compared
    is then the plan of that."""
    ended = [each for each in found if each.HasField("plan") and each.HasField("end") and each.state == "done"]
    plans = [(plan_from_message(each.plan), MODES.get(each.mode, "off"), each.end.ttft_seconds) for each in ended]
    compared = [(plan, mode, told) for plan, mode, took in plans if (told := judged(plan, mode, took)) is not None]
    if not compared:
        return "None of them was planned with a known engine, and ended: nothing to compare."
    off = median(told.error_s / told.took_s for _, _, told in compared)
    loads = [(plan, told) for plan, mode, told in compared if carried_out(plan, mode).way is not Way.PREFILL]
    saved_s = sum(plan.prefill.ttft_s - told.took_s for plan, told in loads)
    regret_s = sum(told.regret_s for _, _, told in compared)
    said = (
        f"{len(compared)} compared: half were off by {off:.0%} or less; the {len(loads)} that loaded something "
        f"saved {saved_s:,.2f} s to first tokens; in all these came {regret_s:,.2f} s later than the fastest ways were "
        "planned to"
    )
    missed_s = sum(told.missed_s for _, _, told in compared)
    return said + f"; with planning on, {missed_s:,.2f} s less" * (missed_s > 0)


def _planned(plan: LoadPlan | None) -> str:
    if plan is None:
        return ""
    return f"{plan.chosen.ttft_s * 1e3:,.1f}" if plan.is_measured else "unknown"


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command()(plans)
