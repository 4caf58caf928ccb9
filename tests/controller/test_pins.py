"""Pins over restarts: they come back for what a tier kept, until their time, within the limit."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvstore.catalog import Catalog, Namespace
from kvstore.config import LimitSettings
from kvstore.controller import pins as pins_module
from kvstore.controller.pins import FORM, Pins
from kvstore.errors import InvalidRequest
from kvstore.keys import ROOT_DIGEST
from kvstore.spec import Exactness
from tests.catalog.shelves import put, shelved_catalog
from tests.simulated.clock import ManualClock
from tests.specs import small_spec

NAMES = [name.encode().ljust(32, b".") for name in ("one", "two", "three")]


class Life:
    """One start of a service whose device has the chunks of ``names``, each after the one before it."""

    def __init__(self, clock: ManualClock, names: list[bytes] = NAMES, **limits: Any) -> None:
        self.catalog: Catalog = shelved_catalog()
        self.space: Namespace = self.catalog.register(small_spec()).namespace(None, Exactness.EXACT)
        bounds = {"leased_bytes_max": 1 << 20, "pin_bytes_max": 1 << 20, **limits}
        self.pins = Pins(self.catalog, LimitSettings(**bounds), clock)
        self.rows = dict[bytes, int]()
        parent = ROOT_DIGEST
        for name in names:
            self.rows[name] = row = self.catalog.row_of(self.space, name, parent, 16)
            put(self.catalog, row, 7)
            self.catalog.publish(row)
            parent = name

    def pinned(self) -> list[bytes]:
        return [name for name, row in self.rows.items() if row in self.pins]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_pins_come_back_with_their_ends_and_what_they_hang_on(clock: ManualClock) -> None:
    first = Life(clock)
    assert not first.pins.is_changed
    first.pins.pin(first.rows[NAMES[1]], 100.0)
    first.pins.pin(first.rows[NAMES[2]], 0)
    assert first.pins.is_changed
    data = first.pins.pack()
    assert not first.pins.is_changed
    clock.advance(50)
    again = Life(clock)
    again.pins.unpack(data)
    assert again.pinned() == NAMES[1:]
    assert again.pins.is_kept(again.rows[NAMES[0]])
    assert not again.pins.is_changed
    clock.advance(52)
    again.pins.expire()
    assert again.pinned() == NAMES[2:]
    assert again.pins.is_changed
    late = Life(clock)
    late.pins.unpack(data)
    assert late.pinned() == NAMES[2:]
    assert late.pins.is_changed, "a pin that ended does not come back"
    late.pins.unpin(late.rows[NAMES[2]])
    last = Life(clock)
    last.pins.unpack(late.pins.pack())
    assert last.pinned() == []


def test_a_chunk_that_is_gone_has_no_pin(clock: ManualClock) -> None:
    first = Life(clock)
    for row in first.rows.values():
        first.pins.pin(row, 0)
    again = Life(clock, NAMES[:1])
    again.pins.unpack(first.pins.pack())
    assert again.pinned() == NAMES[:1]
    assert again.pins.is_changed


def test_past_the_limits_pins_end_and_the_log_says_so(
    clock: ManualClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Life(clock)
    for row in first.rows.values():
        first.pins.pin(row, 0)
    small = Life(clock, pin_bytes_max=first.pins.byte_count - 1)
    with caplog.at_level(logging.WARNING, "kvstore.controller"):
        small.pins.unpack(first.pins.pack())
    assert small.pinned() == NAMES[:2]
    assert "limits.pin_bytes_max" in str(caplog.records[-1].__dict__["reason"])
    monkeypatch.setattr(pins_module, "KEPT_COUNT_MAX", 2)
    again = Life(clock)
    again.pins.unpack(first.pins.pack())
    assert again.pinned() == NAMES[:2]


@pytest.mark.parametrize("wrong", [7, [7], ["ab"], ["xy 0"], ["ab -1"], ["ab 1e3"], [f"ab {10**400}"]])
def test_a_file_that_says_something_wrong_pins_nothing(clock: ManualClock, wrong: Any) -> None:
    life = Life(clock)
    with pytest.raises(InvalidRequest):
        life.pins.unpack(FORM.pack({"ab" * 32 + " in_context exact": wrong}))
    assert not life.pinned()


def test_a_device_that_is_off_for_one_start_takes_no_pins_with_it(clock: ManualClock) -> None:
    first = Life(clock)
    first.pins.pin(first.rows[NAMES[0]], 0)
    without = Life(clock, [])
    del without.catalog.table.copies[1:]
    without.pins.unpack(first.pins.pack())
    assert not without.pins.is_changed, "the file stays as it is"
