"""Measurements as files keep them over restarts: how fast tiers are read, and how fast engines compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.keys import DIGEST_BYTES
from kvstore.planning.kept import KeptForm
from kvstore.planning.loading.compute import TOKENS_MAX, Prefill, Prefills
from kvstore.planning.loading.compute import WINDOW as PREFILLS_MAX
from kvstore.planning.loading.rates import WINDOW as TIMES_MAX
from kvstore.planning.loading.rates import BusyTime, BusyTimes
from kvstore.spec import Tier

TIERS_MAX = 64
ENGINES_MAX = 64
"""Pairs of model and step size whose prefills are remembered."""
PAIR_SHARE_MAX = 1e3
"""No model's attention costs more per pair than this times all else per token; a larger number could overflow."""
VERSION = 1
_RATES = KeptForm("kvstore-rates", VERSION, "tiers", "rates")
_ENGINES = KeptForm("kvstore-engines", VERSION, "engines", "prefills")


@dataclass(frozen=True)
class KeptTier:
    """The kind and the measured busy times of one tier. The file names the tier as the settings do."""

    kind: Tier
    times: BusyTimes


def pack_rates(tiers: Mapping[str, KeptTier]) -> bytes:
    """Return the bytes that ``unpack_rates`` reads."""
    return _RATES.pack(
        {
            name: {
                "kind": int(each.kind),
                "times": [[time.byte_count, time.busy_s, time.is_cut] for time in each.times.times],
            }
            for name, each in sorted(tiers.items())
        }
    )


def unpack_rates(data: bytes) -> dict[str, KeptTier]:
    """Return the tiers by name. Raises: InvalidRequest for a changed byte, another version, or a value that no tier can
    have."""
    tiers = _RATES.unpack(data)
    if len(tiers) > TIERS_MAX:
        raise InvalidRequest(f"it has more than {TIERS_MAX} tiers")
    return {name: _tier_of(each) for name, each in tiers.items()}


def _tier_of(value: Any) -> KeptTier:
    try:
        times = [BusyTime(int(size), float(busy_s), bool(is_cut)) for size, busy_s, is_cut in value["times"]]
        kind = Tier(value["kind"])
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise InvalidRequest(f"a tier's rates cannot be read: {error!r}") from error
    if len(times) > TIMES_MAX or not all(each.is_sound for each in times):
        raise InvalidRequest("a tier's busy times are not what a tier has")
    return KeptTier(kind, BusyTimes(tuple(times)))


def pack_prefills(engines: Mapping[tuple[bytes, int], Prefills]) -> bytes:
    """Return the bytes that ``unpack_prefills`` reads. The engines' keys: a model's fingerprint, and the tokens of one
    forward pass."""
    return _ENGINES.pack(
        {
            f"{name.hex()} {step_tokens}": {
                "pair_share": each.pair_share,
                "prefills": [[one.new_tokens, one.context_tokens, one.seconds, one.passes] for one in each.prefills],
            }
            for (name, step_tokens), each in engines.items()
        }
    )


def unpack_prefills(data: bytes) -> dict[tuple[bytes, int], Prefills]:
    """Return the engines' prefills in the order in which they were packed. Raises: InvalidRequest for a changed byte,
    another version, or a value that no engine can have."""
    engines = _ENGINES.unpack(data)
    if len(engines) > ENGINES_MAX:
        raise InvalidRequest(f"it has more than {ENGINES_MAX} engines")
    return dict(_engine_of(name, each) for name, each in engines.items())


def _engine_of(key: str, value: Any) -> tuple[tuple[bytes, int], Prefills]:
    try:
        name, step = key.split(" ")
        fingerprint, step_tokens, pair_share = bytes.fromhex(name), int(step), float(value["pair_share"])
        done = [
            Prefill(int(new), int(context), float(seconds), int(passes))
            for new, context, seconds, passes in value["prefills"]
        ]
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise InvalidRequest(f"an engine's prefills cannot be read: {error!r}") from error
    is_key = len(fingerprint) == DIGEST_BYTES and 0 <= step_tokens <= TOKENS_MAX
    is_share = 0 <= pair_share <= PAIR_SHARE_MAX
    if not is_key or not is_share or not 0 < len(done) <= PREFILLS_MAX or not all(each.is_sound for each in done):
        raise InvalidRequest("an engine's prefills are not what an engine computes")
    return (fingerprint, step_tokens), Prefills(pair_share, tuple(done))
