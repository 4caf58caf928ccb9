"""Learns what mends cost, and says how much one may compute to be faster than vLLM."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvstore.seams import Clock
from kvstore_client.engines.vllm.documents import WORTH_MAX
from kvstore_client.engines.vllm.planning import RequestPlanner
from kvstore_client.engines.vllm.step import Mended

SEEN_MAX = 8
"""Number of mends of which the usual cost is the median."""
SEEN_S_MAX = 60.0
"""Seconds for which a mend is remembered: where none is worth it, one is made again once that is over, because nothing
else shows that mends have become faster."""


class _Cost(NamedTuple):
    """The seconds that a mend took beside those of its tokens, and the clock's time of it."""

    seconds: float
    at_s: float


class MendWorth:
    """What mends cost in one engine beside the tokens that they compute: calls, and many small steps, which weigh on
    short prompts. vLLM's own speed is the ``planner``'s."""

    def __init__(self, planner: RequestPlanner, clock: Clock, block_tokens: int) -> None:
        self._planner = planner
        self._clock = clock
        self._block_tokens = block_tokens
        self._seen = deque[_Cost](maxlen=SEEN_MAX)

    def mended(self, some: Iterable[Mended]) -> None:
        """Learn from prompts that a worker computed."""
        now_s = self._clock.monotonic()
        for each in some:
            token_s = self._planner.computing_s(0, each.token_count) / each.token_count
            if token_s:
                self._seen.append(_Cost(each.seconds - each.computed * token_s / WORTH_MAX, now_s))

    def computed_max(self, token_count: int, by_vllm: int) -> float:
        """Return how many tokens of a prompt a mend may compute; 0: none is worth it. ``by_vllm``: how many vLLM would,
        the last ones. Behind a mend vLLM computes the last block, too. Any thread may ask."""
        vllm_s = self._planner.computing_s(token_count - by_vllm, token_count)
        costs = self._costs()
        if not vllm_s or not costs:
            return WORTH_MAX * by_vllm
        last_s = self._planner.computing_s((token_count - 1) // self._block_tokens * self._block_tokens, token_count)
        spent_s = max(0.0, statistics.median(costs)) + last_s
        return WORTH_MAX * by_vllm * max(0.0, 1.0 - spent_s / vllm_s)

    def _costs(self) -> list[float]:
        since_s = self._clock.monotonic() - SEEN_S_MAX
        return [each.seconds for each in tuple(self._seen) if each.at_s >= since_s]
