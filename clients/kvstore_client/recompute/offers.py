"""Offers: what one model has of a prompt behind its exact prefix, and which of them are taken together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.spec import ModelSpec
from kvstore_client.match import Match
from kvstore_client.recompute.gate import Permit
from kvstore_client.setting import Recompute


@dataclass(frozen=True)
class Piece:
    """Tokens ``start`` to ``stop`` of the prompt, out of a cache of its tokens ``origin`` to ``end``: a segment's,
    which was computed alone, or the prompt's own beginning."""

    start: int
    stop: int
    origin: int
    end: int
    is_standalone: bool

    @property
    def cache(self) -> tuple[int, int, bool]:
        """Which of a model's caches it is out of."""
        return self.origin, self.end, self.is_standalone


@dataclass(frozen=True)
class Offer:
    """What a ``sender`` has, None: the model itself. ``permit``: by which it may be reused, where the gate decides."""

    pieces: tuple[Piece, ...]
    match: Match
    sender: ModelSpec | None
    permit: Permit | None = None

    @property
    def token_count(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    def around(self, other: Offer) -> Offer:
        """What it has where the other has nothing."""
        pieces = self.pieces
        for taken in other.pieces:
            pieces = tuple(part for piece in pieces for part in _outside(piece, taken))
        return replace(self, pieces=pieces)


@dataclass(frozen=True)
class Choice:
    """Offers that are taken together, no token twice, and the setting for all of them; None: ``reason`` says why."""

    offers: tuple[Offer, ...]
    setting: Recompute | None
    reason: str = ""

    @property
    def token_count(self) -> int:
        return sum(offer.token_count for offer in self.offers)


def pieces_of(match: Match, exact: int, limit: int, token_count: int, *, is_own: bool) -> tuple[Piece, ...]:
    """What a match offers behind the exact prefix and before the tokens whose logits are wanted; of a sender its
    context's cache before its segments'."""
    pieces, free = [], exact
    if not is_own and min(match.prefix_token_count, limit) > free:
        free = min(match.prefix_token_count, limit)
        pieces.append(Piece(exact, free, 0, token_count, False))
    for segment in match.segments:
        start = max(segment.token_start, free)
        stop = min(segment.token_start + segment.standalone_token_count, limit)
        if start < stop:
            pieces.append(Piece(start, stop, segment.token_start, segment.token_stop, True))
    return tuple(pieces)


def choices_of(given: Recompute | None, offers: Sequence[Offer], layer_count: int) -> list[Choice]:
    """What may be taken, the best first: the most tokens, of these the cheapest setting, of these what has the model's
    own segments. Each offer by itself, and the model's own with a sender's where it has nothing itself.

    ``given``: the setting; None: each offer's permit has one, and a mix takes the one that computes at least as much as
    the other in every respect."""
    own = [offer for offer in offers if offer.sender is None and offer.pieces]
    choices = [_alone(given, offer) for offer in offers if offer.pieces]
    for offer in offers:
        rest = offer.around(own[0]) if own and offer.sender is not None else None
        if rest is not None and rest.pieces:
            choices.append(_mixed(given, own[0], rest))

    def rank(choice: Choice) -> tuple[int, float, int]:
        cost = 0.0 if choice.setting is None else choice.setting.share(layer_count)
        return -choice.token_count, cost, -len(choice.offers)

    return sorted(choices, key=rank)


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


def _outside(piece: Piece, taken: Piece) -> list[Piece]:
    """A piece without the tokens of another: it, none, or up to two."""
    if taken.stop <= piece.start or taken.start >= piece.stop:
        return [piece]
    parts = [replace(piece, stop=taken.start), replace(piece, start=taken.stop)]
    return [part for part in parts if part.start < part.stop]
