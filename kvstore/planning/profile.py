"""Profiles: the measured quality and cost of settings for one pair of models on calibration contexts. JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, TypeVar

from blake3 import blake3

from kvstore.errors import InvalidRequest
from kvstore.keys import fingerprint
from kvstore.planning.setting import Recompute
from kvstore.spec import ModelSpec

FORMAT = "kvstore profile"
VERSION = 4
"""In version 4 f has the look ahead in it; the files before would make such settings look cheaper than they are."""
ERRORS = 2.0
"""Number of standard errors subtracted from a measured quality before it is compared with a floor. Of a hundred
settings that just reach the floor, two or three then truly lie below it; clients take the cheapest of a few dozen."""
RULE = f"quality - {ERRORS:g} loss_error >= floor full_quality"
REUSES = ("position", "sibling", "both")
PROFILES_MAX = 64
"""The most profiles of a tenant that the service keeps."""
PROFILE_BYTES_MAX = 4 << 20
PROFILE_SENT_BYTES_MAX = 64 << 10
"""The most bytes of a profile, as JSON, that is registered with the service."""
WHOLE_MAX = (1 << 63) - 1
"""The largest whole number in a profile. JSON allows numbers of any length, which may not fit in a float."""
AMOUNT_MAX = 1e12
SEEDS_MAX = 1024
AGAIN = "measure it again with kvstore profile"
Value = TypeVar("Value")


class Origin(StrEnum):
    """The context in which a profile's caches were computed: after their whole prefix, alone from position 0, or behind
    the preamble that their prompts begin with. PREAMBLE is stored as standalone, under a content key that names the
    preamble; it is profiled apart because its quality differs."""

    IN_CONTEXT = "in_context"
    STANDALONE = "standalone"
    PREAMBLE = "preamble"


@dataclass(frozen=True)
class Side:
    """One model of a profile. ``regime``: hex fingerprint of its architecture, rope, dtypes and weights. The spec's
    name, chunk size, tokenizer and form are left out, because they do not change the quality of its caches."""

    model_id: str
    weights_digest: str
    regime: str

    @staticmethod
    def of(spec: ModelSpec) -> Side:
        plain = replace(spec, model_id="any", chunk_tokens=1, tokenizer_digest="", keeps_e=False)
        return Side(spec.model_id, spec.weights_digest, fingerprint(plain, plain.kind).hex())


@dataclass(frozen=True)
class Calibration:
    """The contexts behind a profile: a digest of all of them and the seeds they were drawn from. ``contexts``: the
    number that the figures were measured on; ``answers``: the number of scored answers to these that are kept or lost
    by themselves. ``search_contexts``: the number of other contexts that the search used. A search among many settings
    finds lucky ones, so the settings found are measured again, on contexts that the search did not see.
    ``token_count_max``, ``run_count_max``: the longest prompt, and the most reused runs in one prompt; the profile does
    not cover larger ones. 0: not given."""

    digest: str
    seeds: tuple[int, ...]
    contexts: int
    answers: int
    search_contexts: int
    token_count_max: int = 0
    run_count_max: int = 0


@dataclass(frozen=True)
class Point:
    """One measured setting. ``share``: f, its share of a prefill's compute. ``quality`` in 0..1 with its standard error
    over contexts. ``loss_error``: the standard error of the loss, which is full prefill's quality less this one's,
    context by context; it is smaller than ``standard_error``. ``misled``: the share of answers for which
    ``drift.misled`` holds. When quality counts whole answers that stay the same, ``tokens`` is the share of their
    tokens that stay the same, and ``kl`` the divergence of full prefill's distributions from this setting's, in nats;
    else both are None."""

    setting: Recompute
    share: float
    quality: float
    standard_error: float
    loss_error: float
    misled: float
    tokens: float | None = None
    kl: float | None = None

    @property
    def assured(self) -> float:
        """The quality less two standard errors of the loss: a point that was measured on few contexts has to be
        better."""
        return self.quality - ERRORS * self.loss_error


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The Pareto frontier of one (sender, receiver, reuse, provenance): every point has a higher assured quality than
    all cheaper points. ``sender`` is None for the receiver's own cache at another position. ``measured_at_s``: the
    start of the measurement, in seconds since 1970."""

    receiver: Side
    sender: Side | None
    reuse: str
    provenance: Origin
    layer_count: int
    calibration: Calibration
    full_quality: float
    full_standard_error: float
    points: tuple[Point, ...]
    measured_at_s: int

    def cheapest(self, floor: float) -> Point | None:
        """Return the point of least f whose assured quality is at least ``floor`` of full prefill's; None: there is no
        such point. Raises: InvalidRequest for a floor outside 0..1."""
        if not 0.0 <= floor <= 1.0:
            raise InvalidRequest(f"floor {floor!r:.40} must be in 0..1, a share of full prefill's quality")
        good = [each for each in self.points if each.assured >= floor * self.full_quality]
        return min(good, key=lambda each: each.share, default=None)

    def check(self, receiver: ModelSpec, sender: ModelSpec | None) -> None:
        """Raises: InvalidRequest when the profile was measured on other models."""
        if receiver.layer_count != self.layer_count:
            raise InvalidRequest(f"the profile is of {self.layer_count} layers, the model has {receiver.layer_count}")
        for name, ours, spec in (("receiver", self.receiver, receiver), ("sender", self.sender, sender)):
            theirs = None if spec is None else Side.of(spec)
            if ours is None or theirs is None:
                if ours is not theirs:
                    raise InvalidRequest(f"the profile has {_named(ours)} as {name}, asked was for {_named(theirs)}")
            elif ours.weights_digest != theirs.weights_digest:
                raise InvalidRequest(
                    f"the profile is of other weights: its {name} {ours.model_id!r} has {ours.weights_digest:.12}, "
                    f"{theirs.model_id!r} has {theirs.weights_digest:.12}; {AGAIN}"
                )
            elif ours.regime != theirs.regime:
                raise InvalidRequest(
                    f"the profile's {name} {ours.model_id!r} has these weights in another dtype, rope or architecture; "
                    f"{AGAIN}"
                )

    def to_json(self) -> str:
        found = {name: value for name, value in vars(self).items() if name not in ("receiver", "sender", "points")}
        found |= {
            "format": FORMAT,
            "version": VERSION,
            "rule": RULE,
            "receiver": asdict(self.receiver),
            "sender": self.sender and asdict(self.sender),
            "provenance": self.provenance.value,
            "calibration": asdict(self.calibration),
            "points": [asdict(point) for point in self.points],
        }
        return json.dumps(found, indent=1, sort_keys=True) + "\n"

    @property
    def digest(self) -> str:
        """Hex digest of the profile's JSON; it identifies the measurement."""
        return blake3(self.to_json().encode()).hexdigest()

    @staticmethod
    def from_json(text: str) -> Profile:
        """Parse and check a profile. Raises: InvalidRequest naming the field that is wrong."""
        found = parsed(text, "the profile")
        version = found.get("version") if isinstance(found, dict) else None
        if not isinstance(found, dict) or found.get("format") != FORMAT or version != VERSION:
            raise InvalidRequest(
                f"not a profile of version {VERSION} (its version is {version!r:.40}): {AGAIN}, by this release"
            )
        if found.get("rule") != RULE:
            raise InvalidRequest(f"rule {found.get('rule')!r:.80} is not this release's, {RULE!r}: {AGAIN}")
        found = {name: value for name, value in found.items() if name not in ("format", "version", "rule")}
        return _profile_of(found)


def parsed(text: str, what: str) -> Any:
    """Parse JSON that has no NaN, infinities or repeated names. ``what`` names the text in the error. Raises:
    InvalidRequest."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name stands twice in one object")
        return dict(pairs)

    def finite(name: str) -> Any:
        raise ValueError(f"{name} is no number")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=finite)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON ({error}): {AGAIN}") from error


def setting_of(value: Any, layer_count: int, what: str) -> Recompute:
    """Return the setting that ``asdict`` turned into ``value``. Raises: InvalidRequest."""
    setting = _object(value, Recompute, what, lambda found: Recompute(**found))
    try:
        setting.check(layer_count)
    except InvalidRequest as error:
        raise InvalidRequest(f"{what}: {error.message}") from error
    return setting


def _profile_of(found: dict[str, Any]) -> Profile:
    _names(found, Profile, "the profile")
    layers = _whole(found["layer_count"], "layer_count")
    if found["reuse"] not in REUSES:
        raise InvalidRequest(f"reuse {found['reuse']!r:.40} must be one of {', '.join(REUSES)}")
    if (found["sender"] is None) != (found["reuse"] == "position"):
        raise InvalidRequest("sender must be there for the reuses 'sibling' and 'both', and only for them")
    if found["provenance"] not in list(Origin):
        raise InvalidRequest(f"provenance {found['provenance']!r:.40} must be one of {', '.join(Origin)}")
    if not isinstance(found["points"], list):
        raise InvalidRequest("points must be a list")
    points = tuple(_point_of(each, layers, f"points[{index}]") for index, each in enumerate(found["points"]))
    if any(a.share >= b.share or a.assured >= b.assured for a, b in pairwise(points)):
        raise InvalidRequest(f"points must rise in share and in quality less {ERRORS:g} standard errors: {AGAIN}")
    return Profile(
        receiver=_side_of(found["receiver"], "receiver"),
        sender=None if found["sender"] is None else _side_of(found["sender"], "sender"),
        reuse=found["reuse"],
        provenance=Origin(found["provenance"]),
        layer_count=layers,
        calibration=_object(found["calibration"], Calibration, "calibration", _calibration_of),
        full_quality=_share(found["full_quality"], "full_quality"),
        full_standard_error=_share(found["full_standard_error"], "full_standard_error"),
        points=points,
        measured_at_s=_whole(found["measured_at_s"], "measured_at_s"),
    )


def _point_of(value: Any, layer_count: int, what: str) -> Point:
    def build(found: dict[str, Any]) -> Point:
        setting = setting_of(found.pop("setting"), layer_count, f"{what}.setting")
        beside = {name: found.pop(name) for name in ("tokens", "kl")}
        if beside["tokens"] is not None:
            beside["tokens"] = _share(beside["tokens"], f"{what}.tokens")
        if beside["kl"] is not None:
            beside["kl"] = _amount(beside["kl"], f"{what}.kl")
        return Point(setting, **{name: _share(each, f"{what}.{name}") for name, each in found.items()}, **beside)

    return _object(value, Point, what, build)


def _side_of(value: Any, what: str) -> Side:
    def build(found: dict[str, Any]) -> Side:
        return Side(**{name: _text(each, f"{what}.{name}") for name, each in found.items()})

    return _object(value, Side, what, build)


def _calibration_of(found: dict[str, Any]) -> Calibration:
    if not isinstance(found["seeds"], list) or len(found["seeds"]) > SEEDS_MAX:
        raise InvalidRequest(f"calibration.seeds must be a list of at most {SEEDS_MAX}")
    seeds = tuple(_whole(each, "calibration.seeds", least=0) for each in found["seeds"])
    counts = (_whole(found[name], f"calibration.{name}") for name in ("contexts", "answers", "search_contexts"))
    most = (_whole(found[name], f"calibration.{name}", least=0) for name in ("token_count_max", "run_count_max"))
    return Calibration(_text(found["digest"], "calibration.digest"), seeds, *counts, *most)


def _object(value: Any, kind: type[Any], what: str, build: Callable[[dict[str, Any]], Value]) -> Value:
    _names(value, kind, what)
    return build(dict(value))


def _names(value: Any, kind: type[Any], what: str) -> None:
    expected = {each.name for each in fields(kind)}
    if not isinstance(value, dict) or set(value) != expected:
        wrong = sorted(set(value) ^ expected) if isinstance(value, dict) else type(value).__name__
        raise InvalidRequest(f"{what} must have exactly {', '.join(sorted(expected))}; differing: {wrong!s:.200}")


def _share(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise InvalidRequest(f"{what} {value!r:.40} must be a number in 0..1")
    return float(value)


def _amount(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value <= AMOUNT_MAX:
        raise InvalidRequest(f"{what} {value!r:.40} must be a number in 0..{AMOUNT_MAX:g}")
    return float(value)


def _whole(value: Any, what: str, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= WHOLE_MAX:
        raise InvalidRequest(f"{what} {value!r:.40} must be a whole number in {least}..{WHOLE_MAX}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value or not _is_text(value):
        raise InvalidRequest(f"{what} {value!r:.40} must be text")
    return value


def _is_text(value: str) -> bool:
    """Return False for half of a character, as JSON may escape it: it cannot be sent, nor printed."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(side: Side | None) -> str:
    return "the receiver itself" if side is None else repr(side.model_id)
