"""Readers that leave: a load goes on for whoever still wants it, and ends where nobody does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.chunk import layout_of
from kvstore.movement.loading import Loading
from kvstore.spec import CacheKind, MissReason
from tests.specs import small_spec

LAYOUT = layout_of(small_spec(), CacheKind.KV, 16)


class Call:
    """What a tier was asked for."""

    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def loading(*events: asyncio.Event, expected: int = 0, **more: Any) -> tuple[Loading, Call]:
    call = Call()
    found = Loading(1, None, LAYOUT, None, expected=expected + len(events), tasks=[call], **more)  # type: ignore[arg-type, list-item]  # no tier is needed
    for event in events:
        found.attend(event)
    return found, call


def test_the_last_reader_that_leaves_ends_the_load() -> None:
    one, two = asyncio.Event(), asyncio.Event()
    found, call = loading(one, two)
    found.leave(one)
    found.leave(one)
    assert (found.lost, call.is_cancelled) == (MissReason.NONE, False)
    found.leave(two)
    assert (found.lost, found.is_left, call.is_cancelled) == (MissReason.UNAVAILABLE, True, True)


def test_one_that_asked_and_does_not_listen_yet_still_wants_it() -> None:
    """So do those that never listen: a prefetch goes on after its operator's patience."""
    one = asyncio.Event()
    found, call = loading(one, expected=1)
    found.leave(one)
    assert (found.is_left, call.is_cancelled) == (False, False)


@pytest.mark.parametrize("first", [frozenset(), frozenset({0})])
def test_one_that_has_what_it_waited_for_lets_the_rest_come(first: frozenset[int]) -> None:
    one = asyncio.Event()
    found, call = loading(one, first=first)
    found.slab_landed(range(1))
    found.leave(one)
    assert call.is_cancelled == (not first), "of all layers one is not enough"


def test_one_whose_deadline_has_passed_lets_it_go_on() -> None:
    one = asyncio.Event()
    found, call = loading(one)
    found.listeners.pop(one)
    found.leave(one)
    assert (found.is_left, call.is_cancelled) == (False, False)
