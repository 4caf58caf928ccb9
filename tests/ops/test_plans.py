"""``kvstore plans``: what others chose is text in its tables, and a number that no plan has is an error."""

from __future__ import annotations

import io
from typing import Any

import pytest
from kvstore_client.lookup.locate import Location
from kvstore_ops import locate, plans
from kvstore_ops.operators.calls import OtherRelease
from kvstore_ops.options import exit_code_of
from rich.console import Console

from kvstore.errors import ERRORS
from kvstore.v1alpha import admin_pb2, prefill_pb2
from tests.ops.command import run

HOSTILE = ("[bold]m", "m[/y]", "[link=http://x]m", "m\x1b[2J\r\n\u202e", "[red]m[/]", "\\[m")


def entry(name: str) -> admin_pb2.PlanEntry:
    ways = [
        prefill_pb2.Candidate(way=prefill_pb2.WAY_PREFILL),
        prefill_pb2.Candidate(way=prefill_pb2.WAY_LOAD, refused=name),
    ]
    plan = prefill_pb2.LoadPlan(token_count=8, candidates=ways, why=name, is_measured=True)
    return admin_pb2.PlanEntry(number=7, model_id=name, state="done", plan=plan)


def shown(drawn: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=400).print(drawn)
    return out.getvalue()


@pytest.mark.parametrize("name", HOSTILE)
def test_names_and_reasons_are_drawn_letter_by_letter(name: str) -> None:
    seen = name.partition("\x1b")[0]
    assert seen in shown(plans.listed([entry(name)]))
    whole = shown(plans.whole(entry(name)))
    assert whole.count(seen) >= 3  # the model, the refusal, the reason
    located = shown(locate.render([Location((), name, name)], [8]))
    assert seen in located
    for text in (whole, located):
        assert not set(text) & set("\x1b\r\u202e")


def test_a_row_of_every_width_fits_eighty_columns_with_its_numbers_whole() -> None:
    slow = entry("a-model-with-a-long-name-" * 4)
    slow.stored_token_count, slow.plan.token_count, slow.plan.chosen = 131_072, 131_072, 1
    slow.end.ttft_seconds, slow.end.wait_seconds = 12.3456, 9.8765
    out = io.StringIO()
    Console(file=out, width=80).print(plans.listed([slow]))
    for number in ("131,072", "12,345.6", "9,876.5"):
        assert number in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_a_number_that_no_plan_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "Operator", lambda _: Known())
    monkeypatch.setattr(plans, "door_of", lambda *_: Nobody())
    assert run("plans", "--number", "7").code == 0
    for more in ((), ("--json",)):
        done = run("plans", "--number", "8", *more)
        assert (done.code, done.out) == (2, "")
        assert "--number 8" in done.err
        assert "kvstore plans" in done.err


def test_an_error_of_a_kind_has_the_code_of_its_kind() -> None:
    assert exit_code_of(OtherRelease("no such call")) == 2
    assert len({exit_code_of(kind("")) for kind in ERRORS}) > 5


class Nobody:
    """A door to no sidecar."""

    def open(self) -> Nobody:
        return self

    def __enter__(self) -> Nobody:
        return self

    def __exit__(self, *_: object) -> None:
        return


class Known:
    """An operator whose sidecar keeps one plan, number 7."""

    def plans(self, _: int) -> list[admin_pb2.PlanEntry]:
        return [entry("m")]
