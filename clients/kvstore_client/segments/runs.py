"""The segments of a prompt: checks a caller's list, and reports what a lookup found."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, TypeAlias

from kvstore.errors import InvalidRequest
from kvstore.keys import Extra, Tokens
from kvstore.spec import Exactness
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.lookup.match import SegmentMatch, chunk_matches, unknown_chunks
from kvstore_client.lookup.presence import LookupAnswer
from kvstore_client.prompt import NO_TOKENS, GivenTokens, Prompt, check_preamble, preamble_tokens
from kvstore_client.segments.known import KnownSegments

GivenRun: TypeAlias = range | tuple[int, int]
"""A run of a prompt's tokens, as a caller names it: a range, or (start, stop)."""


def checked_runs(segments: object, token_count: int) -> list[range]:
    """Return checked runs of tokens. Raises InvalidRequest naming the one that is no run of the prompt, or not behind
    the one before it."""
    if not isinstance(segments, Sequence) or isinstance(segments, str | bytes):
        raise InvalidRequest(f"segments must be a list of (start, stop), not {type(segments).__name__}")
    runs: list[range] = []
    free = 0
    for number, each in enumerate(segments):
        start, stop = _bounds(each, f"segments[{number}]")
        if not free <= start < stop <= token_count:
            raise InvalidRequest(
                f"segments[{number}] ({start}, {stop}) must be a run of the prompt's {token_count} tokens, from {free} "
                "on: behind the segment before it, and not empty"
            )
        runs.append(range(start, stop))
        free = stop
    return runs


def _bounds(given: Any, name: str) -> tuple[int, int]:
    if isinstance(given, range):
        given = (given.start, given.stop) if given.step == 1 else ()
    try:
        start, stop = (index(each) for each in given)
    except (TypeError, ValueError):
        raise InvalidRequest(f"{name} must be a run (start, stop) of tokens, not {given!r:.80}") from None
    return start, stop


def segment_prompt(prompt: Prompt, run: range, exactness: Exactness, preamble: Tokens = NO_TOKENS) -> Prompt:
    """Return one segment as a prompt of its own, alone or behind a preamble. An extra at the prompt's position 0 goes
    with every segment, because it may be a salt."""
    assert prompt.tokens is not None
    inside = [Extra(each.position - run.start, each.data) for each in prompt.extras if each.position in run]
    salts = [each for each in prompt.extras if each.position == 0 and run.start > 0]
    return Prompt.segment(prompt.spec, prompt.tokens[run.start : run.stop], (*salts, *inside), exactness, preamble)


def named_segments(
    prompt: Prompt, segments: object, exactness: Exactness, preamble: GivenTokens = ()
) -> list[tuple[range, Prompt]]:
    """Return the prompt's segments that a caller named, alone or behind a preamble. Raises InvalidRequest, also for a
    prompt that does not begin with the preamble, and for an extra in it that documents would depend on."""
    before = preamble_tokens(preamble, prompt.spec)
    if segments is None:
        return []
    if prompt.hashes is not None or prompt.tokens is None:
        raise InvalidRequest("segments need the prompt's tokens: PageHashes depend on what comes before them")
    check_preamble(prompt.tokens, before)
    if any(0 < each.position < before.size for each in prompt.extras):
        raise InvalidRequest(
            "extras inside the preamble: documents behind it would depend on them; only position 0 may"
        )
    runs = checked_runs(segments, prompt.token_count)
    return [(run, segment_prompt(prompt, run, exactness, before)) for run in runs]


def matched(
    cut: Sequence[tuple[range, Prompt]],
    found: Sequence[pb.SegmentFound | LookupAnswer],
    prefix: int,
    known: KnownSegments,
) -> tuple[SegmentMatch, ...]:
    """Return the match of each segment. A sidecar that knows no segments reports none: they count as missing."""
    matches = []
    for number, (run, prompt) in enumerate(cut):
        step, start, stop = prompt.spec.chunk_tokens, run.start, run.stop
        shared = min(max(0, prefix - start), stop - start)
        if number < len(found):
            chunks = chunk_matches(found[number].runs, step, start, stop)
            standalone = min(found[number].hit_count * step, stop - start)
        else:
            chunks, standalone = unknown_chunks(step, start, stop), 0
        matches.append(SegmentMatch(start, stop, standalone, shared, chunks))
        if matches[-1].is_whole:
            known.learn(prompt)
    return tuple(matches)
