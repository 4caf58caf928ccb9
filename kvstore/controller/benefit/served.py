"""The tokens that one tenant's engines fetched and so did not compute, by model and hour."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvstore.catalog import Namespace
from kvstore.errors import InvalidRequest
from kvstore.keys import DIGEST_BYTES
from kvstore.planning.kept import KeptForm
from kvstore.planning.loading import ComputeRate, saved_seconds
from kvstore.seams import Clock
from kvstore.spec import CacheKind

HOUR_S = 3600
HOUR_COUNT_MAX = 48
"""Hours of a model that are kept, the current one included."""
MODEL_COUNT_MAX = 64
"""Models whose hours are kept: those that were fetched last."""
RATE_COUNT_MAX = 4096
"""Models whose time to compute is kept."""
COUNT_MAX = 1 << 53
"""The largest token count of one hour: a JSON number is exact up to here."""
VERSION = 1
_FORM = KeptForm("kvstore-served", VERSION, "models", "hours")
UNKNOWN = ComputeRate()
NOT_COMPUTED = (CacheKind.OPAQUE, CacheKind.ENCODER)
"""Caches of these kinds stand for no tokens of a prefill."""


class Saving(NamedTuple):
    """``fetch_count`` fetches brought ``token_count`` tokens. ``seconds`` is the time that computing them would have
    taken; fetches made before an engine told how long this model's prefills take count 0 seconds."""

    fetch_count: int = 0
    token_count: int = 0
    seconds: float = 0.0

    def plus(self, other: Saving) -> Saving:
        """Return the sum of both, field by field."""
        return Saving(
            self.fetch_count + other.fetch_count, self.token_count + other.token_count, self.seconds + other.seconds
        )


NOTHING = Saving()


class ServedHour(NamedTuple):
    """The saving of a model's fetches in the hour that began at ``start_s`` (seconds since 1970)."""

    start_s: int
    saving: Saving


class ServedModel(NamedTuple):
    """The saving of a model's fetches: ``total`` since the service's start; ``hours``, the oldest first, also those
    before the start."""

    total: Saving = NOTHING
    hours: tuple[ServedHour, ...] = ()


class Served:
    """One tenant's account. Runs on the event loop's thread. Bounded: ``MODEL_COUNT_MAX`` models of ``HOUR_COUNT_MAX``
    hours, and totals of registered models. Cost: about a microsecond per fetch."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._totals: dict[bytes, Saving] = {}
        self._hours: dict[bytes, dict[int, Saving]] = {}
        self._rates: dict[bytes, ComputeRate] = {}
        self.forgotten = NOTHING
        """The savings, since the service's start, of models that are forgotten."""
        self.is_changed = False
        """True when something was fetched since ``pack`` was last called."""

    def add(self, space: Namespace, token_count: int, fetch_count: int = 1) -> None:
        """Count ``fetch_count`` fetches of one prefix that brought ``token_count`` tokens in sum. E beside a cache, and
        values that no prefill makes, do not count."""
        if space.layer is not None or space.kind in NOT_COMPUTED or not token_count:
            return
        name = space.fingerprint
        seconds = fetch_count * saved_seconds(token_count / fetch_count, self._rates.get(name, UNKNOWN))
        saving = Saving(fetch_count, token_count, seconds)
        self._totals[name] = self._totals.get(name, NOTHING).plus(saving)
        hours = self._hours.pop(name, {})
        self._hours[name] = hours  # it was fetched last
        hour = int(self._clock.wall() // HOUR_S)
        if hour not in hours:
            self._forget(hours, hour)
        hours[hour] = hours.get(hour, NOTHING).plus(saving)
        self.is_changed = True

    def learn(self, fingerprint: bytes, rate: ComputeRate) -> None:
        """Set the time that computing tokens of a model takes, as its engines measured it, for fetches from now on.
        Past ``RATE_COUNT_MAX`` models, that of the model of which engines told nothing for the longest is dropped."""
        self._rates.pop(fingerprint, None)
        self._rates[fingerprint] = rate
        if len(self._rates) > RATE_COUNT_MAX:
            del self._rates[next(iter(self._rates))]

    def forget(self, fingerprint: bytes) -> None:
        """Count a model's total among those of forgotten models from now on. Its hours stay."""
        self.forgotten = self.forgotten.plus(self._totals.pop(fingerprint, NOTHING))

    def of(self, fingerprint: bytes) -> ServedModel:
        """Return the saving of a model's fetches; hours that are too old are left out."""
        hours, first = self._hours.get(fingerprint, {}), int(self._clock.wall() // HOUR_S) - HOUR_COUNT_MAX + 1
        told = tuple(ServedHour(hour * HOUR_S, hours[hour]) for hour in sorted(hours) if hour >= first)
        return ServedModel(self._totals.get(fingerprint, NOTHING), told)

    def _forget(self, hours: dict[int, Saving], hour: int) -> None:
        """Make room for an hour: drop hours that are too old, and hours after it, which a clock that ran ahead left.
        Drop the hours of models past ``MODEL_COUNT_MAX``, too."""
        for each in [each for each in hours if not hour - HOUR_COUNT_MAX < each <= hour]:
            del hours[each]
        while len(self._hours) > MODEL_COUNT_MAX:
            del self._hours[next(iter(self._hours))]

    # ------------------------------------------------------------ over restarts

    def pack(self) -> bytes:
        """Return the hours as ``unpack`` reads them."""
        self.is_changed = False
        return _FORM.pack(
            {name.hex(): [[hour, *each] for hour, each in sorted(hours.items())] for name, hours in self._hours.items()}
        )

    def unpack(self, data: bytes) -> None:
        """Take over the hours that an earlier start packed. Raises InvalidRequest saying what is wrong with ``data``,
        and then takes none."""
        models = _FORM.unpack(data)
        if len(models) > MODEL_COUNT_MAX:
            raise InvalidRequest(f"it has more than {MODEL_COUNT_MAX} models")
        self._hours = dict(_hours_of(name, rows) for name, rows in models.items())


def _hours_of(name: str, rows: Any) -> tuple[bytes, dict[int, Saving]]:
    try:
        fingerprint = bytes.fromhex(name)
        hours = {
            int(hour): Saving(int(fetches), int(tokens), float(seconds)) for hour, fetches, tokens, seconds in rows
        }
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"a model's hours cannot be read: {error!r}") from error
    sound = all(0 < each.fetch_count <= each.token_count <= COUNT_MAX and each.seconds >= 0 for each in hours.values())
    if len(fingerprint) != DIGEST_BYTES or len(hours) > HOUR_COUNT_MAX or not sound:
        raise InvalidRequest("a model's hours are not what fetches bring")
    return fingerprint, hours
