"""The calls of SGLang's backend for pages. Needs no SGLang. None raises because of the sidecar: pages are missing then.

SGLang makes these calls in a thread for loads and one for stores, and each thread serves all requests in turn. So a
sidecar that stands still holds one call each way; those behind it miss at once, for a while.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KVStoreError
from kvstore.seams import SystemClock
from kvstore_client.arrays import Buffer
from kvstore_client.client import Client
from kvstore_client.engines.pause import CallPause

CALL_S_MAX = 5.0
"""The client's timeout. SGLang's engine ends where a thread takes more than 10 s to stop for a flush of the cache."""
STORE_S_MAX = 8.0
"""Seconds after which the pages of one call that are not stored yet are given up."""
Answer = TypeVar("Answer")
_log = logging.getLogger("kvstore.sglang")


class PageCalls:
    """The calls of one rank. Safe to share between threads."""

    def __init__(self, client: Client) -> None:
        self._client = client
        clock = SystemClock()
        self._reading, self._storing = CallPause(clock), CallPause(clock)

    def load(self, namespace: str, keys: Sequence[str], targets: Sequence[Buffer]) -> list[bool]:
        """Fetch each page into its target. Returns one bool per key; the bytes of a target that is False are
        undefined."""
        return _asked(self._reading, [False] * len(keys), lambda: self._client.get_each(namespace, keys, targets))

    def store(self, namespace: str, keys: Sequence[str], pages: Sequence[Buffer]) -> list[bool]:
        """Keep the pages that are not stored yet. Returns, per key, True when its page is stored now."""
        put = partial(self._client.put_each, namespace, keys, pages, timeout_s=STORE_S_MAX)
        return _asked(self._storing, [False] * len(keys), put)

    def read(self, namespace: str, key: str) -> NDArray[np.uint8] | None:
        """Return a page as new bytes; None when it is not stored."""
        found: list[NDArray[np.uint8] | None] = [None]

        def get() -> list[bool]:
            found[0] = self._client.get_bytes(namespace, key)
            return [found[0] is not None]

        _asked(self._reading, [False], get)
        return found[0]

    def has(self, namespace: str, keys: Sequence[str]) -> list[bool]:
        """Return, per key, True when its page is stored, and would be loaded: False for all while loads are paused,
        since SGLang makes room for what is there."""
        return _asked(self._reading, [False] * len(keys), lambda: list(self._client.exists(namespace, keys)))

    def count_leading(self, namespace: str, keys: Sequence[str]) -> int:
        """Return the number of leading pages that are stored; 0 as ``has``."""
        return _asked(self._reading, [0], lambda: [self._client.count_leading(namespace, keys)])[0]


def _asked(pause: CallPause, nothing: list[Answer], call: Callable[[], list[Answer]]) -> list[Answer]:
    """Return a call's answer: ``nothing`` where it fails, or calls are paused. One that took long and brought nothing
    begins a pause."""
    if pause.is_spent:
        return nothing
    try:
        with pause.watch() as watched:
            found = call()
            if any(found):
                watched.more_s = math.inf
        return found
    except KVStoreError as error:
        warn_missing(error)
        return nothing


def warn_missing(error: KVStoreError) -> None:
    """Say why pages are missing."""
    _log.warning("kvstore: %s: these pages count as missing", error.message)
