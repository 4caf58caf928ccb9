"""The segments of a prompt: what a caller says of them, and what a lookup says back."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.keys import Extra
from kvstore_client.match import ChunkMatch
from kvstore_client.prompt import Prompt


class SegmentMatch(NamedTuple):
    """What is stored of one segment.

    ``standalone_token_count``: how many of its first tokens have a cache that was computed for it alone, from position
    0; to be had by ``fetch_segment``, and not exact at another place. ``in_context_token_count``: how many of its first
    tokens belong to the prompt's own stored prefix, which is exact. ``chunks``: the standalone ones, by their places in
    the prompt.
    """

    token_start: int
    token_stop: int
    standalone_token_count: int
    in_context_token_count: int
    chunks: tuple[ChunkMatch, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there, computed alone."""
        return self.standalone_token_count == self.token_stop - self.token_start


def runs_of(segments: Any, token_count: int) -> list[range]:
    """Checked runs of tokens. Raises InvalidRequest naming the one that is no run of the prompt, or not behind the one
    before it."""
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


def segment_prompt(prompt: Prompt, run: range, exactness: Any) -> Prompt:
    """One segment by itself. An extra at the prompt's position 0 goes with every segment, for it may be a salt."""
    assert prompt.tokens is not None
    inside = [Extra(each.position - run.start, each.data) for each in prompt.extras if each.position in run]
    salts = [each for each in prompt.extras if each.position == 0 and run.start > 0]
    return Prompt.segment(prompt.spec, prompt.tokens[run.start : run.stop], (*salts, *inside), exactness)
