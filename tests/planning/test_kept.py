"""The speeds of tiers and engines as files keep them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.errors import InvalidRequest
from kvstore.planning.kept import digest_of
from kvstore.planning.loading import BusyTime, BusyTimes, Prefill, Prefills
from kvstore.planning.loading.compute import WINDOW
from kvstore.planning.loading.kept import (
    ENGINES_MAX,
    TIERS_MAX,
    KeptTier,
    pack_prefills,
    pack_rates,
    unpack_prefills,
    unpack_rates,
)
from kvstore.spec import Tier

NAME = bytes(range(32))


def learned() -> dict[tuple[bytes, int], Prefills]:
    one, other = Prefills(0.001), Prefills(0.002)
    for size in (100, 1000, 4000):
        one = one.observed(Prefill(size, 0, size * 1e-3))
        other = other.observed(Prefill(size, 512, size * 2e-3, passes=2))
    return {(NAME, 0): one, (NAME[::-1], 512): other}


def test_rates_that_no_tier_has_are_refused_though_their_digest_is_right() -> None:
    odd = {"nvme": KeptTier(Tier.NVME, BusyTimes((BusyTime(1 << 20, -1.0),)))}
    with pytest.raises(InvalidRequest, match="busy times"):
        unpack_rates(pack_rates(odd))
    with pytest.raises(InvalidRequest, match="more than"):
        unpack_rates(pack_rates({str(number): measured()["nvme"] for number in range(TIERS_MAX + 1)}))
    with pytest.raises(InvalidRequest, match="version"):
        unpack_rates(pack_rates(measured()).replace(b'"version": 1', b'"version": 2'))


def test_engines_are_kept_in_the_order_in_which_they_told() -> None:
    again = unpack_prefills(pack_prefills(learned()))
    assert list(again) == list(learned())
    assert again[NAME, 0].rate == learned()[NAME, 0].rate


def measured() -> dict[str, KeptTier]:
    times = BusyTimes().observed(BusyTime(1 << 20, 0.1)).observed(BusyTime(2 << 20, 0.3, is_cut=True))
    return {"nvme": KeptTier(Tier.NVME, times), "redis": KeptTier(Tier.REDIS, BusyTimes())}


@pytest.mark.parametrize(
    ("pack", "unpack", "known"),
    [(pack_rates, unpack_rates, measured()), (pack_prefills, unpack_prefills, learned())],
    ids=["rates", "prefills"],
)
def test_what_is_kept_is_what_was_known_and_every_changed_byte_is_seen(
    pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any], known: Any
) -> None:
    data = pack(known)
    assert unpack(data) == known
    for place in range(len(data)):
        wrong = bytearray(data)
        wrong[place] ^= 1
        try:
            assert unpack(bytes(wrong)) == known, "white space may change, a measurement may not"
        except InvalidRequest:
            pass  # refused: as good as the same
    for length in range(0, len(data) - 2, 7):
        with pytest.raises(InvalidRequest):
            unpack(data[:length])


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
        lambda engines: engines[KEY].update(pair_share=1e300),
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
