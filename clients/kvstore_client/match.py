"""What a lookup found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.spec import ChunkState, Encoding, MissReason, Tier


class ChunkMatch(NamedTuple):
    """One chunk of the prompt: where it is, or why not."""

    token_start: int
    token_stop: int
    state: ChunkState
    tier: Tier
    encoding: Encoding
    reason: MissReason


@dataclass(frozen=True)
class Match:
    """How much of a prompt is stored. ``chunks`` covers the prompt; the leading hits make the prefix."""

    prefix_token_count: int
    chunks: tuple[ChunkMatch, ...]

    def __bool__(self) -> bool:
        return self.prefix_token_count > 0
