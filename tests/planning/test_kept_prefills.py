"""The speeds of engines as a file keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.errors import InvalidRequest
from kvstore.planning.kept import digest_of
from kvstore.planning.loading import Prefill, Prefills
from kvstore.planning.loading.compute import WINDOW
from kvstore.planning.loading.kept import ENGINES_MAX, pack_prefills, unpack_prefills

NAME = bytes(range(32))


def learned() -> dict[tuple[bytes, int], Prefills]:
    one, other = Prefills(0.001), Prefills(0.002)
    for size in (100, 1000, 4000):
        one = one.observed(Prefill(size, 0, size * 1e-3))
        other = other.observed(Prefill(size, 512, size * 2e-3, passes=2))
    return {(NAME, 0): one, (NAME[::-1], 512): other}


def test_what_is_kept_is_what_engines_told_in_their_order() -> None:
    again = unpack_prefills(pack_prefills(learned()))
    assert again == learned()
    assert list(again) == list(learned())
    assert again[NAME, 0].rate == learned()[NAME, 0].rate


def test_every_changed_byte_is_seen() -> None:
    data = pack_prefills(learned())
    for place in range(len(data)):
        wrong = bytearray(data)
        wrong[place] ^= 1
        try:
            assert unpack_prefills(bytes(wrong)) == learned(), "white space may change, a time may not"
        except InvalidRequest:
            pass  # refused: as good as the same


KEY = f"{NAME.hex()} 0"


def packed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Prefills with a change, and with the digest that they then have."""
    found = json.loads(pack_prefills(learned()))
    change(found["engines"])
    found["digest"] = digest_of(found["engines"])
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda engines: engines.update({KEY: 5}),
        lambda engines: engines.update({KEY: {"pair_share": 0.1, "prefills": []}}),
        lambda engines: engines[KEY].update(pair_share=-1.0),
        lambda engines: engines[KEY].update(pair_share=1e999),
        lambda engines: engines[KEY].update(prefills=[[100, 0, -1.0, 1]]),
        lambda engines: engines[KEY].update(prefills=[[100, 0, 1.0]]),
        lambda engines: engines[KEY].update(prefills=[[1e999, 0, 1.0, 1]]),
        lambda engines: engines[KEY].update(prefills=[[100, 0, 1.0, 1]] * (WINDOW + 1)),
        lambda engines: engines.update({"00 0": engines[KEY]}),
        lambda engines: engines.update({NAME.hex(): engines[KEY]}),
        lambda engines: engines.update({f"{NAME.hex()} -1": engines[KEY]}),
        lambda engines: engines.update({f"{NAME.hex()} {step}": engines[KEY] for step in range(1, ENGINES_MAX + 1)}),
    ],
)
def test_prefills_that_no_engine_computes_are_refused_though_their_digest_is_right(
    change: Callable[[dict[str, Any]], object],
) -> None:
    assert unpack_prefills(packed(lambda _: None)) == learned()
    with pytest.raises(InvalidRequest, match=r"not what an engine|cannot be read|more than|no number|not JSON"):
        unpack_prefills(packed(change))
