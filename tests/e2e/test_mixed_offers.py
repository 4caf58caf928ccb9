"""The model's own documents first, a sibling's cache where there are none: the same computation as over tensors in
hand, to the bit; and one setting for both, or no mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvstore_client import Client, Exactness, ModelSpec, Recompute
from kvstore_client.recompute import Gate, Permit, recompute

from kvstore.planning import Pair
from kvstore.spec import Provenance
from tests.e2e.prefills import RECEIVER, SENDER, alone, given, keep, keep_alone, same
from tests.recompute.models import prompt

SETTINGS = [Recompute.reuse(), Recompute.cacheblend(1, 0.2), Recompute(1, 2, 0.3), Recompute(1, 1, 0.25, "product")]


def kept(client: Client, seed: int) -> tuple[torch.Tensor, list[Any]]:
    """90 tokens: the sender has the first 80, the receiver 20 to 45 and 58 to 70, alone. And what each made."""
    tokens = prompt(90, seed)
    theirs = keep(client, SENDER, tokens[:80], 1)
    return tokens, [
        theirs, keep_alone(client, RECEIVER, tokens[20:45], 1), keep_alone(client, RECEIVER, tokens[58:70], 1)
    ]  # fmt: skip


@pytest.mark.parametrize("exact", [0, 32])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_own_documents_come_first_and_a_sibling_fills_what_is_left(
    client: Client, setting: Recompute, exact: int
) -> None:
    tokens, (theirs, one, two) = kept(client, 700 + 10 * SETTINGS.index(setting) + (exact > 0))
    first, sender = setting.first_layer, SENDER.spec
    if exact:
        runs = [given(keep(client, RECEIVER, tokens[:exact]), 0, exact), alone(one, exact, exact - 20, first)]
    else:
        runs = [given(theirs, 0, 20, first, sender), alone(one, 20, 0, first)]
    runs += [given(theirs, 45, 58, first, sender), alone(two, 58, 0, first), given(theirs, 70, 80, first, sender)]
    found = client.partial_prefill(
        RECEIVER, tokens, segments=[(20, 45), (58, 70)], senders=[sender], recompute=setting, logit_count=2
    )
    same(found, recompute(RECEIVER, tokens, runs, setting, logit_count=2))
    assert (found.exactness, found.plan.reason) == (Exactness.DERIVED, "")
    assert [(run.token_start, run.sender) for run in found.plan.runs] == [(run.token_start, run.sender) for run in runs]
    assert found.plan.reused_token_count == 80


def test_what_nobody_has_is_computed(client: Client) -> None:
    """The sender ends within the second document, of which the receiver has all."""
    tokens = prompt(90, 760)
    theirs, own = keep(client, SENDER, tokens[:64]), keep_alone(client, RECEIVER, tokens[58:83])
    runs = [given(theirs, 0, 58, 0, SENDER.spec), alone(own, 58)]
    setting = Recompute.cacheblend(1, 0.3)
    found = client.partial_prefill(
        RECEIVER, tokens, segments=[(20, 45), (58, 83)], senders=[SENDER.spec], recompute=setting
    )
    same(found, recompute(RECEIVER, tokens, runs, setting))


class Says(Gate):
    """A gate with a setting for each kind of reuse."""

    def __init__(self, settings: dict[str, Recompute]) -> None:
        super().__init__()
        self._settings = settings

    def permit(
        self, receiver: ModelSpec, sender: ModelSpec | None, reuse: str, provenance: Provenance | None = None, *,
        floor: float | None = None,
    ) -> Permit:  # fmt: skip
        pair = Pair.of(receiver, sender, reuse, provenance or Provenance.IN_CONTEXT)
        setting = self._settings.get(reuse)
        return Permit(pair, setting, "" if setting else f"nothing is known of {reuse}")


BLEND, STRICTER, OTHER = Recompute.cacheblend(1, 0.2), Recompute.cacheblend(2, 0.3), Recompute(0, -1, 0.15, "product")


@pytest.mark.parametrize(
    ("position", "sibling", "taken", "run_count", "reason"),
    [
        (BLEND, STRICTER, STRICTER, 5, ""),
        (STRICTER, BLEND, BLEND, 1, ""),  # the sender has as much by itself, for less
        (BLEND, OTHER, OTHER, 1, "neither setting covers the other"),
        (BLEND, None, BLEND, 2, ""),
        (None, BLEND, BLEND, 1, "nothing is known of position"),
    ],
)  # fmt: skip
def test_the_gate_decides_what_is_mixed(
    client: Client, position: Recompute, sibling: Recompute, taken: Recompute, run_count: int, reason: str
) -> None:
    tokens, (theirs, one, two) = kept(client, 770 + run_count)
    settings = {"position": position, "sibling": sibling}
    client.gate = Says({name: setting for name, setting in settings.items() if setting})
    found = client.partial_prefill(RECEIVER, tokens, segments=[(20, 45), (58, 70)], senders=[SENDER.spec])
    assert (found.plan.recompute, len(found.plan.runs)) == (taken, run_count)
    assert reason in found.plan.reason
    first, sender = taken.first_layer, SENDER.spec
    runs = {
        1: [given(theirs, 0, 80, first, sender)],
        2: [alone(one, 20, 0, first), alone(two, 58, 0, first)],
        5: [
            given(theirs, 0, 20, first, sender), alone(one, 20, 0, first), given(theirs, 45, 58, first, sender),
            alone(two, 58, 0, first), given(theirs, 70, 80, first, sender),
        ],
    }[run_count]  # fmt: skip
    same(found, recompute(RECEIVER, tokens, runs, taken))


def test_covering_is_computing_at_least_as_much() -> None:
    assert STRICTER.covers(BLEND)
    assert not BLEND.covers(STRICTER)
    assert BLEND.covers(BLEND)
    assert not STRICTER.covers(OTHER)
    assert STRICTER.covers(Recompute.droidspeak(1, 1))
    assert not Recompute.droidspeak(0, 1).covers(BLEND)
