"""The choice of an encoding: by what it saves and what it takes, and not by noise."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.chunk import EncodingCost
from kvstore.spec import Encoding
from kvstore.tiers.choice import AGAIN_COUNT, FIRST_COUNT, MODEL_COUNT_MAX, EncodingChoice, pays

SMALLER = EncodingCost(ratio=0.8, encode_s=3e-9, decode_s=1e-9)
"""Of each byte a fifth is saved, for 4 ns."""
EVEN_S = 10e-9
"""The line's seconds for a byte at which both take the same: a fifth of them, saved twice, is 4 ns."""
CHUNK_BYTES = 1 << 20
MODEL, OTHER = b"m" * 32, b"o" * 32


@pytest.mark.parametrize(
    ("line_s", "paid_s", "is_chosen", "expected"),
    [
        (2 * EVEN_S, 0.0, False, True),
        (0.5 * EVEN_S, 0.0, True, False),
        (1.1 * EVEN_S, 0.0, False, False),  # not by enough to change
        (1.1 * EVEN_S, 0.0, True, True),
        (0.9 * EVEN_S, 0.0, True, True),
        (0.0, 0.0, True, False),  # a line that nobody measured saves nothing
        (0.0, 4 * EVEN_S, False, True),  # but a byte that is paid for does
    ],
)
def test_lz4_pays_where_it_saves_more_seconds_than_it_takes(
    line_s: float, paid_s: float, is_chosen: bool, expected: bool
) -> None:
    assert pays(SMALLER, line_s, paid_s, is_chosen=is_chosen) is expected


def test_what_saves_too_few_bytes_never_pays() -> None:
    assert not pays(EncodingCost(0.95, 1e-12, 1e-12), 1.0, 1.0, is_chosen=True)


def measured(choice: EncodingChoice, model: bytes, cost: EncodingCost = SMALLER, count: int = FIRST_COUNT) -> None:
    for _ in range(count):
        way = choice.way_of(model)
        assert way == (Encoding.RAW, True), "a chunk that is measured shows the line, too"
        choice.measured(model, cost)


def test_each_model_is_raw_until_it_is_measured_and_then_what_pays() -> None:
    choice = EncodingChoice("auto")
    choice.answered(1.0)
    choice.sent(CHUNK_BYTES, 1.0 + CHUNK_BYTES * 2 * EVEN_S)  # a request alone takes a second
    measured(choice, MODEL)
    measured(choice, OTHER, EncodingCost(1.0, 1e-9, 1e-9))
    assert choice.way_of(MODEL) == (Encoding.LZ4, False)
    assert choice.way_of(OTHER) == (Encoding.RAW, False)
    told = {each.fingerprint: each for each in choice.figures()}
    assert (told[MODEL].encoding, told[OTHER].encoding) == ("lz4", "raw")
    assert told[MODEL].encode_bytes_per_s == pytest.approx(1 / 3e-9)
    assert told[MODEL].line_bytes_per_s == pytest.approx(1 / (2 * EVEN_S), rel=1e-3)
    assert (told[MODEL].ratio, told[MODEL].sample_count) == (pytest.approx(0.8), FIRST_COUNT)


def test_a_model_whose_measurements_failed_stays_raw() -> None:
    choice = EncodingChoice("auto", paid_s=1.0)
    for _ in range(FIRST_COUNT):
        assert choice.way_of(MODEL).is_measured
    choice.measured(MODEL, SMALLER)
    assert choice.way_of(MODEL) == (Encoding.RAW, False)


def test_the_first_measurements_count_alike() -> None:
    choice = EncodingChoice("auto")
    for encode_s in (9e-9, 3e-9, 3e-9):
        choice.way_of(MODEL)
        choice.measured(MODEL, SMALLER._replace(encode_s=encode_s))
    (told,) = choice.figures()
    assert told.encode_bytes_per_s == pytest.approx(1 / 5e-9)


def test_a_canary_says_nothing_of_the_line() -> None:
    """Its 8 KiB take as long as its request does. Every model would be encoded after each of them, and with that be
    measured once in a thousand chunks alone."""
    choice = EncodingChoice("auto")
    for _ in range(10):
        choice.sent(CHUNK_BYTES, CHUNK_BYTES * 0.1 * EVEN_S)
    measured(choice, MODEL)
    choice.sent(8 << 10, 0.01)
    assert choice.way_of(MODEL).encoding is Encoding.RAW
    (told,) = choice.figures()
    assert told.line_bytes_per_s == pytest.approx(1 / (0.1 * EVEN_S))


def test_it_is_measured_again_now_and_then_and_follows_what_changed() -> None:
    choice = EncodingChoice("auto")
    choice.sent(CHUNK_BYTES, CHUNK_BYTES * 2 * EVEN_S)
    measured(choice, MODEL)
    ways = [choice.way_of(MODEL) for _ in range(8 * AGAIN_COUNT - FIRST_COUNT)]
    assert sum(way.is_measured for way in ways) == 7
    for _ in range(30):
        choice.sent(CHUNK_BYTES, CHUNK_BYTES * 0.1 * EVEN_S)  # the line is a fast one now
    choice.way_of(MODEL)
    assert choice.way_of(MODEL).encoding is Encoding.RAW


@pytest.mark.parametrize(("setting", "encoding"), [("raw", Encoding.RAW), ("lz4", Encoding.LZ4)])
def test_a_set_encoding_is_no_choice(setting: str, encoding: Encoding) -> None:
    choice = EncodingChoice(setting, paid_s=1.0)
    assert {choice.way_of(MODEL) for _ in range(2 * AGAIN_COUNT)} == {(encoding, False)}
    assert not choice.figures()


def test_models_that_are_kept_apart_are_bounded() -> None:
    choice: Any = EncodingChoice("auto")
    for number in range(MODEL_COUNT_MAX + 5):
        choice.way_of(number.to_bytes(32, "big"))
    choice.measured(bytes(32), SMALLER)  # forgotten meanwhile
    assert len(choice.figures()) == MODEL_COUNT_MAX
