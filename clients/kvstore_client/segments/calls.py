"""The client's calls for segments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.keys import Extra, fingerprint
from kvstore.spec import Durability, Exactness, MissReason, ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.fetching import FetchedKV, LayerStream
from kvstore_client.match import chunk_matches, missed_chunks
from kvstore_client.paged import Paged
from kvstore_client.presence import Answer
from kvstore_client.prompt import PageHashes, Prompt
from kvstore_client.receipt import Receipt
from kvstore_client.segments.known import KnownSegments
from kvstore_client.segments.runs import SegmentMatch, runs_of, segment_prompt
from kvstore_client.wanted import Wanted


class SegmentCalls(ABC):
    """What ``Client`` can do with documents."""

    _known: KnownSegments

    @abstractmethod
    def _keep(
        self, prompt: Prompt, kv: Sequence[Any], hidden: Mapping[int, Any] | None, durability: Durability | None
    ) -> Receipt:
        """The client's."""

    @abstractmethod
    def _get(self, prompt: Prompt, wanted: Wanted, into: Any) -> FetchedKV:
        """The client's."""

    @abstractmethod
    def _stream(self, prompt: Prompt, wanted: Wanted, into: Any) -> LayerStream:
        """The client's."""

    def store_segment(
        self,
        spec: ModelSpec,
        tokens: Any,
        kv: Sequence[Any],
        *,
        hidden: Mapping[int, Any] | None = None,
        durability: Durability | None = None,
        extras: Sequence[Extra] = (),
        exactness: Exactness | None = None,
    ) -> Receipt:
        """Keep a document's cache that was computed alone: nothing before it, K rotated from position 0 on. It is found
        under its tokens wherever they stand, and never as the prefix of a prompt.

        Shapes as in ``store``; ``extras``: positions count from the document's first token. Raises: InvalidRequest.
        """
        prompt = Prompt.segment(spec, tokens, extras, exactness)
        receipt = self._keep(prompt, kv, hidden, durability)
        self._learn(prompt)
        return receipt

    def fetch_segment(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        layers: Sequence[int] | None = None,
        heads: range | tuple[int, int] | None = None,
        hidden_layers: Sequence[int] = (),
        into: Sequence[Any] | Paged | None = None,
        extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
        verify: bool = False,
    ) -> FetchedKV:
        """A document's cache as it was computed, alone: K is rotated for positions 0, 1, ... As much of its beginning
        as is stored; everything else as in ``fetch``."""
        prompt = Prompt.segment(spec, tokens, extras, exactness)
        found = self._get(prompt, Wanted.of(prompt.spec, layers, heads, hidden_layers, verify), into)
        if prompt.digests and found.token_count == prompt.token_count:
            self._learn(prompt)
        return found

    def fetch_segment_layers(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        layers: Sequence[int] | None = None,
        heads: range | tuple[int, int] | None = None,
        into: Sequence[Any] | Paged | None = None,
        extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
        verify: bool = False,
    ) -> LayerStream:
        """Like ``fetch_segment``, layer by layer, as ``fetch_layers`` does. Its ``token_count`` says at once how much
        of the document is there."""
        prompt = Prompt.segment(spec, tokens, extras, exactness)
        return self._stream(prompt, Wanted.of(prompt.spec, layers, heads, (), verify), into)

    def find_segments(self, spec: ModelSpec, tokens: Any) -> list[range]:
        """Where documents that this client stored, fetched or looked up stand in a text, for ``lookup(segments=)``.
        Each is confirmed by the digest of all its tokens. Documents of fewer than 32 tokens, and those with extras, are
        not found; nothing is asked of the sidecar.

        Raises: InvalidRequest."""
        if isinstance(tokens, PageHashes):
            raise InvalidRequest("find_segments needs the tokens, not their hashes")
        prompt = Prompt.of(spec, tokens, (), Exactness.EXACT)
        assert prompt.tokens is not None
        return self._known.find(fingerprint(spec, spec.kind), prompt.tokens)

    def _learn(self, prompt: Prompt) -> None:
        if not prompt.extras and prompt.tokens is not None:
            self._known.add(fingerprint(prompt.spec, prompt.spec.kind), prompt.tokens)

    def _cut(self, prompt: Prompt, segments: Any, exactness: Exactness) -> list[tuple[range, Prompt]]:
        """The prompt's segments as a caller named them. Raises InvalidRequest."""
        if segments is None:
            return []
        if prompt.hashes is not None or prompt.tokens is None:
            raise InvalidRequest("segments need the prompt's tokens: PageHashes depend on what comes before them")
        runs = runs_of(segments, prompt.token_count)
        return [(run, segment_prompt(prompt, run, exactness)) for run in runs]

    def _matched(
        self, cut: Sequence[tuple[range, Prompt]], found: Sequence[pb.SegmentFound | Answer], prefix: int
    ) -> tuple[SegmentMatch, ...]:
        """What was found of each. A sidecar that knows no segments says nothing of them: they are not there."""
        matches = []
        for number, (run, prompt) in enumerate(cut):
            step, start, stop = prompt.spec.chunk_tokens, run.start, run.stop
            shared = min(max(0, prefix - start), stop - start)
            if number < len(found):
                chunks = chunk_matches(found[number].runs, step, start, stop)
                standalone = min(found[number].hit_count * step, stop - start)
            else:
                chunks, standalone = missed_chunks(step, start, stop, MissReason.UNAVAILABLE), 0
            matches.append(SegmentMatch(start, stop, standalone, shared, chunks))
            if matches[-1].is_whole:
                self._learn(prompt)
        return tuple(matches)
