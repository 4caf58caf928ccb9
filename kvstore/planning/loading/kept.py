"""The file that keeps rates over restarts: one JSON object with a version and a digest of the rates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from kvstore.errors import InvalidRequest
from kvstore.planning.loading.rates import WINDOW, BusyTime, BusyTimes
from kvstore.planning.profile import parsed
from kvstore.spec import Tier

FORMAT, VERSION = "kvstore-rates", 1
TIERS_MAX = 64


@dataclass(frozen=True)
class KeptTier:
    """The kind and the measured busy times of one tier. The file names the tier as the settings do."""

    kind: Tier
    times: BusyTimes


def pack_rates(tiers: Mapping[str, KeptTier]) -> bytes:
    """Return the JSON that ``unpack_rates`` reads."""
    found = {
        name: {
            "kind": int(each.kind),
            "times": [[time.byte_count, time.busy_s, time.is_cut] for time in each.times.times],
        }
        for name, each in sorted(tiers.items())
    }
    whole = {"format": FORMAT, "version": VERSION, "tiers": found, "digest": _digest(found)}
    return json.dumps(whole, indent=1).encode() + b"\n"


def unpack_rates(data: bytes) -> dict[str, KeptTier]:
    """Return the tiers by name. Raises: InvalidRequest for a changed byte, another version, or a value that no tier can
    have."""
    try:
        found = parsed(data.decode(), "the file of rates")
    except UnicodeDecodeError as error:
        raise InvalidRequest("it is no text") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
        raise InvalidRequest(f"it is no {FORMAT} of version {VERSION}")
    tiers = found.get("tiers")
    if not isinstance(tiers, dict) or len(tiers) > TIERS_MAX or found.get("digest") != _digest(tiers):
        raise InvalidRequest("its digest is not that of its rates")
    return {name: _tier_of(each) for name, each in tiers.items()}


def _tier_of(value: Any) -> KeptTier:
    try:
        times = [BusyTime(int(size), float(busy_s), bool(is_cut)) for size, busy_s, is_cut in value["times"]]
        kind = Tier(value["kind"])
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidRequest(f"a tier's rates cannot be read: {error!r}") from error
    if len(times) > WINDOW or not all(each.is_sound for each in times):
        raise InvalidRequest("a tier's busy times are not what a tier has")
    return KeptTier(kind, BusyTimes(tuple(times)))


def _digest(tiers: Mapping[str, Any]) -> str:
    return blake3(json.dumps(tiers, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
