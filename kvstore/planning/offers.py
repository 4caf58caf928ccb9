"""Offers: the stored runs of one model behind the exact prefix of a prompt. Choices: offers that are taken together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.planning.facts import Facts, Holding, StoredSegment
from kvstore.planning.permit import Permit
from kvstore.planning.plan import StoredCache, is_exact
from kvstore.planning.setting import Recompute
from kvstore.spec import ModelSpec


@dataclass(frozen=True)
class OfferedRun:
    """Tokens ``start`` to ``stop`` of the prompt, from a cache."""

    start: int
    stop: int
    cache: StoredCache

    @property
    def is_exact(self) -> bool:
        return is_exact(self.cache)


@dataclass(frozen=True)
class Offer:
    """The runs that a ``sender`` has stored; None: the model itself. ``permit``: the permit to reuse them, where a
    profile decides."""

    runs: tuple[OfferedRun, ...]
    sender: ModelSpec | None
    permit: Permit | None = None

    @property
    def token_count(self) -> int:
        return sum(run.stop - run.start for run in self.runs)

    def around(self, other: Offer) -> Offer:
        """Return the offer with only those tokens that the other offer has not. The runs of both are ascending."""
        runs: list[OfferedRun] = []
        others = iter(other.runs)
        taken = next(others, None)
        for run in self.runs:
            start = run.start
            while taken is not None and taken.start < run.stop:
                if start < taken.start:
                    runs.append(replace(run, start=start, stop=taken.start))
                start = max(start, taken.stop)
                if taken.stop > run.stop:  # it may reach into the next run, too
                    break
                taken = next(others, None)
            if start < run.stop:
                runs.append(replace(run, start=start))
        return replace(self, runs=tuple(runs))


@dataclass(frozen=True)
class Choice:
    """Offers that are taken together, no token twice, and the setting for all of them. ``setting`` None: they may not
    be taken, and ``reason`` says why."""

    offers: tuple[Offer, ...]
    setting: Recompute | None
    reason: str = ""

    @property
    def token_count(self) -> int:
        return sum(offer.token_count for offer in self.offers)


def offers_of(facts: Facts) -> list[Offer]:
    """Return each model's offer behind the exact prefix. Models that have nothing there, or that no profile allows,
    are left out."""
    offers = [_offer(facts, each) for each in (facts.own, *facts.senders) if each.sender is None or not each.is_refused]
    return [offer for offer in offers if offer.runs]


def choices_of(given: Recompute | None, offers: Sequence[Offer], layer_count: int) -> list[Choice]:
    """Return the choices, the best first: the most tokens, then the cheapest setting, then choices with the model's own
    segments. A choice is one offer, or the model's own offer together with a sender's around it.

    ``given``: the setting; None: each offer's permit has one. A mix then takes the setting that computes at least as
    much as the other in every respect."""
    own = [offer for offer in offers if offer.sender is None]
    choices = [_alone(given, offer) for offer in offers]
    for offer in offers:
        rest = offer.around(own[0]) if own and offer.sender is not None else None
        if rest is not None and rest.runs:
            choices.append(_mixed(given, own[0], rest))

    def rank(choice: Choice) -> tuple[int, float, int]:
        cost = 0.0 if choice.setting is None else choice.setting.share(layer_count)
        return -choice.token_count, cost, -len(choice.offers)

    return sorted(choices, key=rank)


def exact_runs(facts: Facts) -> tuple[OfferedRun, ...]:
    """Return the stored runs that equal the model's own prefill of this prompt: its stored prefix, and behind it a
    segment that stands where it was computed. Ascending; between the two there may be tokens of the preamble."""
    limit = facts.reusable_token_count
    start, free = facts.load_start, min(facts.own.prefix_token_count, limit)
    runs = [OfferedRun(start, free, StoredCache(start, facts.own.prefix_token_count))] if free > start else []
    for segment in facts.own.segments:
        start, stop = max(segment.token_start, free), min(segment.token_start + segment.stored_token_count, limit)
        if segment.is_exact and start < stop:
            runs.append(OfferedRun(start, stop, _cache_of(segment, None)))
    return tuple(runs)


def _cache_of(segment: StoredSegment, sender: ModelSpec | None) -> StoredCache:
    return StoredCache(segment.token_start, segment.token_stop, True, sender, segment.stood_at)


def _offer(facts: Facts, holding: Holding) -> Offer:
    """Return a model's stored runs behind the exact runs. A sender's in-context cache goes before its segments."""
    sender, limit = holding.sender, facts.reusable_token_count
    exact = exact_runs(facts)
    free = max((run.stop for run in exact), default=0)
    runs = []
    if sender is not None and min(holding.prefix_token_count, limit) > free:
        cache = StoredCache(0, holding.prefix_token_count, sender=sender)
        runs.append(OfferedRun(free, min(holding.prefix_token_count, limit), cache))
        free = runs[0].stop
    for segment in holding.segments:
        start = max(segment.token_start, free)
        stop = min(segment.token_start + segment.stored_token_count, limit)
        if start < stop:
            runs.append(OfferedRun(start, stop, _cache_of(segment, sender)))
    reuse = "position"
    if sender is not None:
        reuse = "both" if any(run.cache.is_standalone for run in runs) else "sibling"
    permit = None if facts.setting else holding.permit(reuse)
    # A profile counts all documents of its prompts, the first one, too, which may stand where it was computed.
    run_count = len(runs) + (sum(run.cache.is_standalone for run in exact) if sender is None else 0)
    return Offer(tuple(runs), sender, permit and permit.within(facts.token_count, run_count))


def _alone(given: Recompute | None, offer: Offer) -> Choice:
    if given is not None or offer.permit is None:
        return Choice((offer,), given)
    return Choice((offer,), offer.permit.setting, offer.permit.reason)


def _mixed(given: Recompute | None, own: Offer, other: Offer) -> Choice:
    offers = (own, other)
    if given is not None:
        return Choice(offers, given)
    permits = [offer.permit for offer in offers if offer.permit is not None]
    settings = [permit.setting for permit in permits if permit.setting is not None]
    if len(settings) < len(offers):
        return Choice(offers, None, next((permit.reason for permit in permits if permit.reason), ""))
    name = other.sender.model_id if other.sender else ""
    stricter = next((each for each in settings if all(map(each.covers, settings))), None)
    reason = (
        "" if stricter else f"own segments are not mixed with the cache of {name!r}: neither setting covers the other"
    )
    return Choice(offers, stricter, reason)
