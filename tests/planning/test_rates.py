"""What is learned of tiers and of models: from few measurements, odd ones, and changes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from kvstore.planning.loading import BusyTime, BusyTimes, Operations, Prefill, Prefills
from kvstore.spec import ModelSpec

MIB = 1 << 20


def times(*pairs: tuple[int, float]) -> BusyTimes:
    found = BusyTimes()
    for byte_count, busy_s in pairs:
        found = found.observed(BusyTime(byte_count, busy_s))
    return found


def test_a_rate_is_bytes_over_busy_time() -> None:
    rate = times((10 * MIB, 0.1), (20 * MIB, 0.25), (30 * MIB, 0.25)).rate
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(100 * MIB)
    assert rate.latency_s == 0.0
    assert rate.sample_count == 3


def test_latency_is_told_from_bandwidth_only_where_sizes_differ() -> None:
    latency_s, byte_s = 0.05, 1e-8
    alike = times(*[(MIB + number, latency_s + (MIB + number) * byte_s) for number in range(5)]).rate
    apart = times(*[(MIB << number, latency_s + (MIB << number) * byte_s) for number in range(5)]).rate
    assert alike is not None
    assert apart is not None
    assert (alike.latency_s, alike.seconds(MIB)) == (0.0, pytest.approx(latency_s + MIB * byte_s, rel=0.01))
    assert alike.seconds(10) >= 0.2 * alike.seconds(MIB), "nobody knows what far fewer bytes take"
    assert (apart.latency_s, apart.byte_s) == (pytest.approx(latency_s, rel=0.01), pytest.approx(byte_s, rel=0.01))


def test_a_rate_says_how_sure_it_is() -> None:
    one, many = times((MIB, 0.1)).rate, times(*[(MIB, 0.1)] * 12).rate
    wild = times(*[(MIB, 0.1 * factor) for factor in (1, 1.6, 0.7, 1.7, 0.8, 1.8) * 2]).rate
    assert one is not None
    assert many is not None
    assert wild is not None
    assert one.caution == 1.5
    assert many.caution < 1.06
    assert wild.caution > 1.3
    assert one.confidence < many.confidence
    assert wild.confidence < many.confidence
    assert BusyTimes().rate is None


@pytest.mark.parametrize(
    "measured",
    [[(16 << 30, 1.0), (512, 30.0)], [(121_215_481, 1.0), (203_114_981, 1.0), (73_349, 1.0)]],
    ids=["a pause", "one time for all sizes"],
)
def test_what_is_measured_is_a_rate_that_may_be_told(measured: list[tuple[int, float]]) -> None:
    """A rate beyond all bounds is none to whoever it is told, and the assumed one would stand for the slowest tier."""
    rate = times(*measured).rate
    assert rate is not None
    assert rate.is_sound, rate


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_two_surprises_of_one_kind_make_a_rate_of_their_own(factor: float) -> None:
    steady = times(*[(MIB, 0.1)] * 10)
    once = steady.observed(BusyTime(MIB, 0.1 * factor))
    assert len(once.times) == 11, "one may be chance"
    twice = once.observed(BusyTime(MIB, 0.1 * factor))
    assert twice.rate is not None
    assert twice.rate.seconds(MIB) == pytest.approx(0.1 * factor)
    assert len(once.observed(BusyTime(MIB, 0.1)).observed(BusyTime(MIB, 0.1 * factor)).times) == 13


def test_sizes_that_were_not_seen_are_no_surprise() -> None:
    large = times(*[(64 * MIB, 0.64)] * 6)
    both = large.observed(BusyTime(4096, 0.01)).observed(BusyTime(4096, 0.01))
    assert len(both.times) == 8
    assert both.rate is not None
    assert both.rate.latency_s == pytest.approx(0.01, rel=0.05)


def test_what_was_cut_counts_as_at_least_this_slow() -> None:
    steady = times(*[(MIB, 0.1)] * 4)
    assert steady.observed(BusyTime(MIB, 0.05, is_cut=True)) is steady
    slower = steady.observed(BusyTime(MIB, 0.5, is_cut=True)).observed(BusyTime(MIB, 0.5, is_cut=True))
    assert slower.rate is not None
    assert slower.rate.seconds(MIB) >= 0.5


@pytest.mark.parametrize("busy_s", [0.0, -1.0, math.nan, math.inf, 1e9, 1e18, 5e-324, 1e-200])
def test_absurd_times_are_left_out(busy_s: float) -> None:
    steady = times((MIB, 0.1))
    assert steady.observed(BusyTime(MIB, busy_s)) is steady
    assert steady.observed(BusyTime(0, 0.1)) is steady
    model = Prefills(1e-4).observed(Prefill(100, 0, 0.1))
    assert model.observed(Prefill(100, 0, busy_s)) is model
    assert model.observed(Prefill(0, 0, 0.1)) is model
    assert model.observed(Prefill(100, -1, 0.1)) is model


# ------------------------------------------------------------ compute

SPEC = ModelSpec.dense("m", "a1" * 32, layer_count=32, kv_heads=8, head_dim=128, hidden_size=4096, vocab_size=1000)


def learned(truth: tuple[float, float, float], prefills: list[tuple[int, int]], share: float) -> Prefills:
    model = Prefills(share)
    for new, context in prefills:
        seconds = truth[0] + truth[1] * new + truth[2] * new * (context + new / 2)
        model = model.observed(Prefill(new, context, seconds))
    return model


def test_operations_of_a_known_model() -> None:
    """Llama 3 8B: 7 G weights in layers, 14 GFLOP a token; attention 4 x 4096 x 32 a pair; few heads of K and V."""
    found = Operations.of(SPEC)
    assert found.token == pytest.approx(14e9, rel=0.25)
    assert found.pair == 4 * 4096 * 32
    assert found.projection_share == pytest.approx(0.048, rel=0.1)


def test_one_prefill_predicts_others_by_the_operation_count() -> None:
    share = Operations.of(SPEC).pair_share
    rate = learned((0.0, 1e-4, share * 1e-4), [(1000, 0)], share).rate
    assert rate.seconds(8000) == pytest.approx(1e-4 * (8000 + share * 32e6))
    assert rate.seconds(1000, 8000) > rate.seconds(1000)


def test_coefficients_are_fitted_where_the_spread_tells_them_apart() -> None:
    truth, share = (0.02, 1e-4, 4e-8), 1e-4
    alike = learned(truth, [(1000 + number, 0) for number in range(8)], share).rate
    assert (alike.pass_s, alike.pair_s) == (0.0, pytest.approx(share * alike.token_s))
    sizes = [(100, 0), (400, 0), (1000, 0), (4000, 0), (200, 0), (2000, 0)]
    apart = learned(truth, [*sizes, (500, 8000), (100, 16000), (1000, 4000)], share).rate
    assert apart.pass_s == pytest.approx(truth[0], rel=0.05)
    assert apart.token_s == pytest.approx(truth[1], rel=0.05)
    assert apart.pair_s == pytest.approx(truth[2], rel=0.05)


def test_one_request_that_waited_raises_nothing_and_a_busy_machine_does_at_once() -> None:
    model = learned((0.0, 1e-4, 0.0), [(1000, 0)] * 12, 0.0)
    once = model.observed(Prefill(1000, 0, 1.0))
    assert once.rate.seconds(1000) == pytest.approx(0.1)
    busy = once.observed(Prefill(1000, 0, 0.3)).observed(Prefill(1000, 0, 0.3))
    assert busy.rate.seconds(1000) == pytest.approx(0.3)
    assert busy.rate.token_s == pytest.approx(1e-4), "the slow coefficients stay"
    again = busy
    for _ in range(2):
        again = again.observed(Prefill(1000, 0, 0.1))
    assert again.rate.seconds(1000) == pytest.approx(0.1)


@pytest.mark.parametrize("factor", [1e-4, 1e-2, 30.0, 1e3])
def test_an_engine_that_became_another_one_is_known_after_three_requests(factor: float) -> None:
    """Beyond what a load can be: another device, or a first prefill that was compiled for."""
    model = learned((0.0, 1e-4, 0.0), [(1000, 0)] * 32, 0.0)
    for _ in range(3):
        model = model.observed(Prefill(1000, 0, 0.1 * factor))
    assert model.rate.seconds(1000) == pytest.approx(0.1 * factor)
    once = learned((0.0, 1e-4, 0.0), [(1000, 0)] * 32, 0.0).observed(Prefill(1000, 0, 0.1 * factor))
    assert len(once.prefills) == 32, "one may be chance"


def test_steps_take_a_pass_each() -> None:
    rate = Prefills(0.0).observed(Prefill(100, 0, 0.1)).rate
    assert rate.seconds(100, 0, 10) == pytest.approx(rate.seconds(100))
    sizes = learned((0.01, 1e-3, 0.0), [(10, 0), (100, 0), (1000, 0)], 0.0).rate
    assert sizes.seconds(100, 0, 10) == pytest.approx(0.1 + 10 * 0.01, rel=0.01)


def test_a_few_tokens_do_not_say_what_a_prompt_takes() -> None:
    """A pass of 32 tokens may have taken the time of reading the weights. By the token, a prompt would look so slow
    that it is never computed, and nothing would ever say that this is wrong."""
    few = learned((0.02, 1e-5, 0.0), [(32, 1000)] * 8, 0.0).rate
    assert few.seconds(32) == pytest.approx(0.02032)
    assert few.seconds(16) < few.seconds(32) == few.seconds(300), "what a device computes while it reads the weights"
    assert few.seconds(600) == pytest.approx(2 * few.seconds(300))
    many = learned((0.02, 1e-5, 0.0), [(1000, 0)], 0.0).rate
    assert (many.seconds(4000), many.seconds(32)) == (pytest.approx(0.12), pytest.approx(0.03 * 0.032))
    assert few.is_sound
    assert not replace(few, most_tokens=-1).is_sound


def test_the_last_large_prefill_is_remembered_however_many_small_ones_follow() -> None:
    truth = (0.02, 1e-4, 0.0)
    sizes = [(4000, 0), (3000, 0), *[(32 + number % 3, 4000) for number in range(100)]]
    model = learned(truth, sizes, 0.0)
    assert len(model.prefills) == 32
    assert model.prefills[0].new_tokens == 3000
    assert model.rate.seconds(8000) == pytest.approx(0.82, rel=0.01)
    assert model.observed(Prefill(2000, 0, 0.22)).prefills[-1].new_tokens == 2000
    later = learned(truth, [*sizes, (2500, 0), *[(32, 4000)] * 40], 0.0)
    assert [each.new_tokens for each in later.prefills if each.new_tokens > 100] == [2500]


def test_noise_of_a_tenth_moves_predictions_by_less() -> None:
    draw = random.Random(3)
    model = Prefills(1e-4)
    for _ in range(32):
        new, context = draw.choice((256, 1024, 4096)), draw.choice((0, 1024, 8192))
        seconds = 0.01 + 1e-4 * new + 1e-8 * new * (context + new / 2)
        model = model.observed(Prefill(new, context, seconds * draw.uniform(0.9, 1.1)))
    expected = 0.01 + 1e-4 * 2048 + 1e-8 * 2048 * (2048 + 1024)
    assert model.rate.seconds(2048, 2048) == pytest.approx(expected, rel=0.1)
