"""Profiles: what is written is what is read, and nothing else is; the cheapest setting that keeps enough."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvstore_client import ModelSpec, Recompute
from kvstore_client.gate.profiles import Profiles

from kvstore.errors import InvalidRequest
from kvstore.planning import Calibration, Pair, Point, Profile, Side
from kvstore.spec import Provenance

RECEIVER = ModelSpec.dense(
    "ours", "a1" * 32, layer_count=6, kv_heads=2, head_dim=16, hidden_size=64, vocab_size=96, chunk_tokens=32
)
SENDER = replace(RECEIVER, model_id="theirs", weights_digest="b2" * 32)
POINTS = (
    Point(Recompute.reuse(), 0.0, 0.2, 0.02, 0.02, 0.8),
    Point(Recompute(0, 1, 0.15), 0.4, 0.9395, 0.012, 0.003, 0.03),
    Point(Recompute(1, 3, 0.25, "product", "k"), 0.55, 0.948, 0.011, 0.002, 0.01),
)
PROFILE = Profile(
    receiver=Side.of(RECEIVER), sender=Side.of(SENDER), reuse="sibling", provenance=Provenance.IN_CONTEXT,
    layer_count=6, calibration=Calibration("c3" * 32, (1101, 1102), 64, 512, 32), full_quality=0.95,
    full_standard_error=0.011, points=POINTS, measured_at_s=1_700_000_000,
)  # fmt: skip
PAIR = Pair.of(RECEIVER, SENDER, "sibling", Provenance.IN_CONTEXT)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path / "state" / "profiles")
    assert profiles.read(PAIR) is None
    profiles.write(PROFILE, profiles.path(PAIR))
    assert profiles.read(PAIR) == PROFILE
    assert [path.name for path in profiles.directory.iterdir()] == [PAIR.file_name]


def test_the_cheapest_setting_that_keeps_enough_even_with_bad_luck() -> None:
    assert PROFILE.cheapest(0.0) == POINTS[0]
    assert PROFILE.cheapest(0.98) == POINTS[1]
    # 0.9395 is more than 0.985 of 0.95, also when one standard error is taken off, but not when two are.
    assert 0.9395 - 0.003 > 0.985 * 0.95 > 0.9395 - 2 * 0.003
    assert PROFILE.cheapest(0.985) == POINTS[2]
    assert PROFILE.cheapest(0.999) is None
    with pytest.raises(InvalidRequest, match="floor"):
        PROFILE.cheapest(99.0)


def test_a_profile_is_of_these_weights_and_no_others() -> None:
    PROFILE.check(replace(RECEIVER, chunk_tokens=256, model_id="renamed"), SENDER)
    for receiver, sender, named in (
        (replace(RECEIVER, weights_digest="d4" * 32), SENDER, "receiver 'ours' has a1a1"),
        (RECEIVER, replace(SENDER, weights_digest="d4" * 32), "sender 'theirs' has b2b2"),
        (replace(RECEIVER, cache_dtype="float16"), SENDER, "another dtype"),
        (RECEIVER, None, "sender"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            PROFILE.check(receiver, sender)


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(PROFILE.to_json()), **fields})


def with_point(**fields: Any) -> str:
    points = json.loads(PROFILE.to_json())["points"]
    return changed(points=[{**points[0], **fields}])


def with_setting(**fields: Any) -> str:
    return with_point(setting={**json.loads(PROFILE.to_json())["points"][1]["setting"], **fields})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "JSON"),
        ("[]", "version"),
        (PROFILE.to_json()[:-40], "JSON"),
        (PROFILE.to_json().replace("0.95", "NaN", 1), "NaN"),
        ('{"format": "kvstore profile", "format": "kvstore profile"}', "twice"),
        ("[" * 100_000, "JSON"),
        (changed(version=1), "version"),
        (changed(version=2), "version"),
        (changed(version=3), "version 4"),
        (changed(rule="quality >= floor full_quality"), "rule"),
        (changed(format="else"), "version"),
        (changed(more=1), "more"),
        (changed(points={}), "points"),
        (changed(full_quality=1.5), "full_quality"),
        (changed(full_quality=True), "full_quality"),
        (changed(layer_count=1), "layers"),
        (changed(layer_count="6"), "layer_count"),
        (changed(reuse="prefix"), "reuse"),
        (changed(reuse=["sibling"]), "reuse"),
        (changed(provenance="guess"), "provenance"),
        (changed(sender=None), "sender"),
        (changed(receiver={"model_id": "x"}), "receiver"),
        (changed(calibration={**json.loads(PROFILE.to_json())["calibration"], "seeds": [1.5]}), "seeds"),
        (with_point(share=-0.1), "share"),
        (with_point(quality="0.9"), "quality"),
        (with_point(setting=None), "setting"),
        (with_setting(ratio=1.01), "ratio"),
        (with_setting(ratio="much"), "ratio"),
        (with_setting(first_layer=6, last_layer=6), "first_layer"),
        (with_setting(selector="best"), "selector"),
        (
            changed(calibration={**json.loads(PROFILE.to_json())["calibration"], "search_contexts": 0}),
            "search_contexts",
        ),
        (changed(calibration={**json.loads(PROFILE.to_json())["calibration"], "answers": 10**400}), "answers"),
        (changed(points=json.loads(PROFILE.to_json())["points"][::-1]), "rise"),
        (replace(PROFILE, points=(POINTS[1], replace(POINTS[2], loss_error=0.0073))).to_json(), "rise"),
    ],
)
def test_what_is_no_profile_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Profile.from_json(text)
