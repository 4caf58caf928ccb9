"""What the sidecar has of a prompt, and the fetches that bring it to where it is merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvstore.errors import DataLoss
from kvstore.keys import Extra, Tokens
from kvstore.spec import Exactness, MissReason, ModelSpec
from kvstore_client.match import Match
from kvstore_client.prompt import Prompt
from kvstore_client.recompute.fetched import Ahead, FetchedRun, ProjectedRun, places
from kvstore_client.recompute.gate import Permit
from kvstore_client.recompute.merged import dense_planes
from kvstore_client.recompute.offers import Offer, Piece, choices_of, pieces_of
from kvstore_client.recompute.plan import Plan, PlannedRun
from kvstore_client.recompute.runner import ModelRunner
from kvstore_client.recompute.runs import Run
from kvstore_client.segments.runs import segment_prompt
from kvstore_client.setting import Recompute
from kvstore_client.transfer import Transfer

if TYPE_CHECKING:
    from kvstore_client.client import Client


def _reuse_of(pieces: Sequence[Piece], sender: ModelSpec | None) -> str:
    """The kind of reuse whose profile speaks for all of the pieces."""
    if sender is None:
        return "position"
    return "both" if any(piece.is_standalone for piece in pieces) else "sibling"


_Cache = tuple[ModelSpec, tuple[int, int, bool]]


class Fetching:
    """What is fetched of one prompt, and where it goes. ``limit``: tokens from there on are computed in any case.
    ``permits``: by which what is not exact is reused, when the gate was asked and something is."""

    def __init__(
        self, client: Client, runner: ModelRunner, tokens: Tokens, extras: tuple[Extra, ...], limit: int,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self._client, self._runner, self._tokens, self._extras = client, runner, tokens, extras
        self._limit, self._timeout_s = limit, timeout_s
        self.permits: tuple[Permit, ...] = ()
        self._tickets: set[bytes] = set()
        self._sources: list[FetchedRun] = []
        self._transfers: dict[_Cache, Transfer] = {}
        self._ahead: dict[tuple[_Cache, int], Transfer] = {}
        self._runs: list[Run] = []
        self._planned: list[PlannedRun] = []
        self._planes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(
        self, setting: Recompute | None, senders: Sequence[ModelSpec], segments: Sequence[Any] | None
    ) -> tuple[Plan, list[Run], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Ask what is there and start what is to be fetched. Returns the plan, its runs, and where they land. The merge
        of these runs waits for each layer that is fetched: after it nothing is on its way there."""
        spec = self._runner.spec
        own = self._held(spec, segments)
        exact = min(own.prefix_token_count, self._limit)
        self._planes = dense_planes(spec, len(self._tokens), self._runner.device)
        if exact:
            piece = Piece(0, exact, 0, len(self._tokens), False)
            self._take(piece, [piece], own, spec, None, spec.slab_layers)
        reason = ""
        if any(chunk.reason is MissReason.UNAVAILABLE for chunk in own.chunks[:1]):
            reason = "the sidecar is unavailable"
        elif senders or segments:
            if setting is None or not setting.computes_all(spec.layer_count):
                setting, reason = self._take_best(setting, exact, own, senders, segments)
        self._release()
        self._ahead.clear()  # the runs have it, until each took its E
        self._runs.sort(key=lambda run: run.token_start)
        self._planned.sort(key=lambda planned: planned.token_start)
        lossy = any(not planned.is_exact for planned in self._planned)
        plan = Plan(len(self._tokens), tuple(self._planned), setting if lossy else None, reason)
        return plan, self._runs, self._planes

    def close(self) -> None:
        """Stop what is on its way, and hold nothing. Idempotent."""
        for source in self._sources:
            source.close()
        for transfer in self._ahead.values():
            transfer.cancel(self._timeout_s)
        self._release()

    def _release(self) -> None:
        while self._tickets:
            self._client.release_ticket(self._tickets.pop())

    def _held(self, spec: ModelSpec, segments: Sequence[Any] | None) -> Match:
        match = self._client.lookup(spec, self._tokens, hold=True, extras=self._extras, segments=segments)
        if match.ticket:
            self._tickets.add(match.ticket)
        return match

    def _take_best(
        self, given: Recompute | None, exact: int, own: Match, senders: Sequence[ModelSpec],
        segments: Sequence[Any] | None,
    ) -> tuple[Recompute | None, str]:  # fmt: skip
        """Fetch the tokens behind the exact prefix: the model's own segments, a sender's cache, or both; as ``given``,
        else as the gate permits. Returns the setting, and why nothing is, or not all that could be."""
        offers, reason = [self._offer(own, exact, None, given)], ""
        for sender in senders:
            asked = [] if given else [self._permit(sender, reuse) for reuse in ("sibling", "both")]
            if asked and not any(permit.setting for permit in asked):
                reason = reason or asked[0].reason
                continue
            offers.append(self._offer(self._held(sender, segments), exact, sender, given))
        refused = ""
        for choice in choices_of(given, offers, self._runner.spec.layer_count):
            if choice.setting is None:
                reason, refused = choice.reason, refused or choice.reason * (len(choice.offers) > 1)
                continue
            taken = [(offer, self._take_piece(choice.setting, piece, offer)) for offer in choice.offers
                     for piece in offer.pieces]  # fmt: skip
            used = [offer for offer, missing in taken if not missing]
            if used:
                self.permits = tuple(dict.fromkeys(offer.permit for offer in used if offer.permit is not None))
                return choice.setting, refused
            reason = taken[0][1]
        return given, reason or "nobody has anything behind the exact prefix"

    def _offer(self, match: Match, exact: int, sender: ModelSpec | None, given: Recompute | None) -> Offer:
        pieces = pieces_of(match, exact, self._limit, len(self._tokens), is_own=sender is None)
        permit = None if given or not pieces else self._permit(sender, _reuse_of(pieces, sender))
        return Offer(pieces, match, sender, permit)

    def _permit(self, sender: ModelSpec | None, reuse: str) -> Permit:
        return self._client.gate.permit(self._runner.spec, sender, reuse)

    def _take_piece(self, setting: Recompute, piece: Piece, offer: Offer) -> str:
        """Fetch a piece that is not exact, E first. Returns why not."""
        match, sender = offer.match, offer.sender
        spec, first = sender or self._runner.spec, setting.first_layer
        layers, ahead = setting.loaded_layers(spec.layer_count), None
        if setting.needs_hidden and not self._is_exact(piece, sender):
            if spec.keeps_e:
                layers = tuple(sorted({*layers, first}))
            else:
                # Layer 0 is always loaded then, and comes along.
                ahead_of = (spec, piece.cache), first
                if ahead_of not in self._ahead:
                    self._ahead[ahead_of] = self._asked(piece, spec, layers[:1], None, (first,))
                transfer = self._ahead[ahead_of]
                stop = min(piece.stop, piece.origin + transfer.token_count)
                if stop <= piece.start:
                    return f"{spec.model_id!r} has no E of layer {first}: {transfer.reason.name}"
                ahead = Ahead(transfer, first, slice(piece.start - piece.origin, stop - piece.origin))
                piece = replace(piece, stop=stop)
        parts = [each for each in offer.pieces if each.cache == piece.cache]
        self._take(piece, parts, match, spec, sender, layers, ahead, first)
        return ""

    def _take(
        self, piece: Piece, parts: Sequence[Piece], match: Match, spec: ModelSpec, sender: ModelSpec | None,
        layers: tuple[int, ...], ahead: Ahead | None = None, hidden_layer: int = 0,
    ) -> None:  # fmt: skip
        """Fetch a piece, without the first layer where that comes with E. ``parts``: all that is taken of its cache."""
        is_exact = self._is_exact(piece, sender)
        layers = spec.slab_layers if is_exact else layers
        rows = slice(piece.start - piece.origin, piece.stop - piece.origin)
        source = (
            ProjectedRun(self._timeout_s, self._runner, rows, piece.start, hidden_layer)
            if spec.keeps_e
            else FetchedRun(self._timeout_s, self._runner.device, ahead)
        )
        self._sources.append(source)
        coming = layers[1:] if ahead is not None else layers
        if coming:
            source.follow(self._started(piece, parts, match, spec, coming))
        count, rotated_from = piece.stop - piece.start, piece.start - piece.origin * piece.is_standalone
        self._runs.append(Run(piece.start, count, source, rotated_from, sender, is_exact))
        self._planned.append(PlannedRun(piece.start, count, layers, sender, piece.is_standalone, is_exact))

    @staticmethod
    def _is_exact(piece: Piece, sender: ModelSpec | None) -> bool:
        """The model's own prefix; also a segment that begins the prompt: it was computed there."""
        return sender is None and (piece.start == 0 or not piece.is_standalone)

    def _started(
        self, piece: Piece, parts: Sequence[Piece], match: Match, spec: ModelSpec, layers: tuple[int, ...]
    ) -> Transfer:
        """The transfer of a cache, one for all of its parts."""
        key = spec, piece.cache
        if key in self._transfers:
            return self._transfers[key]
        into = None
        if not spec.keeps_e:
            windows = [(k[:, piece.origin : piece.end], v[:, piece.origin : piece.end]) for k, v in self._planes]
            reach = min(piece.end if piece.is_standalone else match.prefix_token_count, self._limit)
            wanted = [range(part.start - piece.origin, part.stop - piece.origin) for part in parts]
            into = places(windows, layers, wanted, is_last=max(part.stop for part in parts) >= reach)
        if not piece.is_standalone:
            assert match.ticket is not None, "what a lookup found, it holds"
            transfer = self._client.start_fetch(match.ticket, into=into, layers=layers)
            self._tickets.discard(match.ticket)  # the transfer redeems it; one that could not begin does not
        else:
            transfer = self._asked(piece, spec, layers, into)
            if transfer.token_count < piece.stop - piece.origin:
                transfer.cancel(self._timeout_s)
                raise DataLoss(f"a segment was lost since it was looked up: {transfer.reason.name}")
        self._transfers[key] = transfer
        return transfer

    def _asked(
        self, piece: Piece, spec: ModelSpec, layers: tuple[int, ...], into: Any, hidden_layers: tuple[int, ...] = ()
    ) -> Transfer:
        """Fetch by tokens what a piece is stored under."""
        if not piece.is_standalone:
            return self._client.start_fetch_prefix(
                spec, self._tokens, into=into, layers=layers, hidden_layers=hidden_layers, extras=self._extras
            )
        whole = Prompt.of(spec, self._tokens, self._extras, Exactness.EXACT)
        segment = segment_prompt(whole, range(piece.origin, piece.end), Exactness.EXACT)
        return self._client.start_fetch_segment(
            spec, segment.tokens, into=into, layers=layers, hidden_layers=hidden_layers, extras=segment.extras
        )
