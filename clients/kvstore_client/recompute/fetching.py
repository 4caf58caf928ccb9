"""What the sidecar has of a prompt, and the fetches that bring it to where it is merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from kvstore_client.recompute.plan import Plan, PlannedRun
from kvstore_client.recompute.runner import ModelRunner
from kvstore_client.recompute.runs import Run
from kvstore_client.segments.runs import segment_prompt
from kvstore_client.setting import Recompute
from kvstore_client.transfer import Transfer

if TYPE_CHECKING:
    from kvstore_client.client import Client


@dataclass(frozen=True)
class Piece:
    """Tokens ``start`` to ``stop`` of the prompt, out of a cache of its tokens ``origin`` to ``end``: a segment's,
    which was computed alone, or the prompt's own beginning."""

    start: int
    stop: int
    origin: int
    end: int
    is_standalone: bool


def pieces_of(match: Match, exact: int, limit: int, token_count: int, *, is_own: bool) -> list[Piece]:
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
    return pieces


def _reuse_of(pieces: Sequence[Piece], sender: ModelSpec | None) -> str:
    """The kind of reuse whose profile speaks for all of the pieces."""
    if sender is None:
        return "position"
    return "both" if any(piece.is_standalone for piece in pieces) else "sibling"


class Fetching:
    """What is fetched of one prompt, and where it goes. ``limit``: tokens from there on are computed in any case.
    ``permit``: by which what is not exact is reused, when the gate was asked and something is."""

    def __init__(
        self, client: Client, runner: ModelRunner, tokens: Tokens, extras: tuple[Extra, ...], limit: int,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self._client, self._runner, self._tokens, self._extras = client, runner, tokens, extras
        self._limit, self._timeout_s = limit, timeout_s
        self.permit: Permit | None = None
        self._tickets: set[bytes] = set()
        self._sources: list[FetchedRun] = []
        self._runs: list[Run] = []
        self._planned: list[PlannedRun] = []
        self._planes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(
        self, setting: Recompute | None, senders: Sequence[ModelSpec], segments: Sequence[Any] | None
    ) -> tuple[Plan, list[Run], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Ask what is there and start what is to be fetched. Returns the plan, its runs, and where they land."""
        spec = self._runner.spec
        own = self._held(spec, segments)
        exact = min(own.prefix_token_count, self._limit)
        self._planes = dense_planes(spec, len(self._tokens), self._runner.device)
        if exact:
            self._take(Piece(0, exact, 0, len(self._tokens), False), own, spec, None, spec.slab_layers)
        reason = ""
        if any(chunk.reason is MissReason.UNAVAILABLE for chunk in own.chunks[:1]):
            reason = "the sidecar is unavailable"
        elif senders or segments:
            if setting is None or not setting.computes_all(spec.layer_count):
                setting, reason = self._take_best(setting, exact, own, senders, segments)
        self._release()
        lossy = any(not planned.is_exact for planned in self._planned)
        plan = Plan(len(self._tokens), tuple(self._planned), setting if lossy else None, reason)
        return plan, self._runs, self._planes

    def finish(self) -> None:
        """Return when everything has landed. Raises what did not."""
        for source in self._sources:
            source.finish()

    def close(self) -> None:
        """Stop what is on its way, and hold nothing. Idempotent."""
        for source in self._sources:
            source.close()
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
        """Fetch the tokens behind the exact prefix from whoever has the most of them: the model itself, of segments, or
        a sender; as ``given``, else as the gate permits. Returns the setting, and why nothing is."""
        count, reason = len(self._tokens), ""
        offers: list[tuple[list[Piece], Match, ModelSpec | None]] = [
            (pieces_of(own, exact, self._limit, count, is_own=True), own, None)
        ]
        for sender in senders:
            asked = [] if given else [self._permit(sender, reuse) for reuse in ("sibling", "both")]
            if asked and not any(permit.setting for permit in asked):
                reason = reason or asked[0].reason
                continue
            match = self._held(sender, segments)
            offers.append((pieces_of(match, exact, self._limit, count, is_own=False), match, sender))
        offers.sort(key=lambda offer: -sum(piece.stop - piece.start for piece in offer[0]))
        for pieces, match, whose in offers:
            if not pieces:
                continue
            permit = None if given else self._permit(whose, _reuse_of(pieces, whose))
            setting = permit.setting if permit else given
            if setting is None:
                reason = permit.reason if permit else reason
                continue
            missing = [self._take_piece(setting, piece, match, whose) for piece in pieces]
            if not all(missing):
                self.permit = permit
                return setting, ""
            reason = missing[0]
        return given, reason or "nobody has anything behind the exact prefix"

    def _permit(self, sender: ModelSpec | None, reuse: str) -> Permit:
        return self._client.gate.permit(self._runner.spec, sender, reuse)

    def _take_piece(self, setting: Recompute, piece: Piece, match: Match, sender: ModelSpec | None) -> str:
        """Fetch a piece that is not exact, E first. Returns why not."""
        spec, first = sender or self._runner.spec, setting.first_layer
        layers, ahead = setting.loaded_layers(spec.layer_count), None
        if setting.needs_hidden and not self._is_exact(piece, sender):
            if spec.keeps_e:
                layers = tuple(sorted({*layers, first}))
            else:
                # Layer 0 is always loaded then, and comes along.
                transfer = self._asked(piece, spec, layers[:1], None, (first,))
                stop = min(piece.stop, piece.origin + transfer.token_count)
                if stop <= piece.start:
                    transfer.cancel(self._timeout_s)
                    return f"{spec.model_id!r} has no E of layer {first}: {transfer.reason.name}"
                ahead = Ahead(transfer, first, slice(piece.start - piece.origin, stop - piece.origin))
                piece = replace(piece, stop=stop)
        self._take(piece, match, spec, sender, layers, ahead, first)
        return ""

    def _take(
        self, piece: Piece, match: Match, spec: ModelSpec, sender: ModelSpec | None, layers: tuple[int, ...],
        ahead: Ahead | None = None, hidden_layer: int = 0,
    ) -> None:  # fmt: skip
        """Fetch a piece, without the first layer where that comes with E."""
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
            source.follow(self._started(piece, match, spec, coming))
        count, rotated_from = piece.stop - piece.start, piece.start - piece.origin * piece.is_standalone
        self._runs.append(Run(piece.start, count, source, rotated_from, sender, is_exact))
        self._planned.append(PlannedRun(piece.start, count, layers, sender, piece.is_standalone, is_exact))

    @staticmethod
    def _is_exact(piece: Piece, sender: ModelSpec | None) -> bool:
        """The model's own prefix; also a segment that begins the prompt: it was computed there."""
        return sender is None and (piece.start == 0 or not piece.is_standalone)

    def _started(self, piece: Piece, match: Match, spec: ModelSpec, layers: tuple[int, ...]) -> Transfer:
        into = None
        if not spec.keeps_e:
            windows = [(k[:, piece.origin : piece.end], v[:, piece.origin : piece.end]) for k, v in self._planes]
            into = places(windows, layers, piece.start - piece.origin)
        if not piece.is_standalone:
            assert match.ticket is not None, "what a lookup found, it holds"
            self._tickets.discard(match.ticket)
            return self._client.start_fetch(match.ticket, into=into, layers=layers)
        transfer = self._asked(piece, spec, layers, into)
        if transfer.token_count < piece.stop - piece.origin:
            transfer.cancel(self._timeout_s)
            raise DataLoss(f"a segment was lost since it was looked up: {transfer.reason.name}")
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
