"""What became of a store."""

from __future__ import annotations

import os
from concurrent.futures import Future

from kvstore.errors import DeadlineExceeded
from kvstore.spec import Durability


class Receipt:
    """The promise of a store. The tensors may be reused as soon as it is in your hands."""

    def __init__(self, future: Future[tuple[Durability, int, str]]) -> None:
        self._future = future
        self._pid = os.getpid()

    def _outcome(self, timeout: float | None = None) -> tuple[Durability, int, str]:
        if self._pid != os.getpid() and not self._future.done():
            return Durability.NONE, 0, "the process that stored it knows; this is a fork of it"
        return self._future.result(timeout)

    @staticmethod
    def nothing(reason: str) -> Receipt:
        """The receipt of a store that kept nothing."""
        future: Future[tuple[Durability, int, str]] = Future()
        future.set_result((Durability.NONE, 0, reason))
        return Receipt(future)

    def wait(self, timeout: float | None = None) -> Durability:
        """The durability reached by the leading ``stored_token_count`` tokens; NONE when nothing was kept.

        Raises: DeadlineExceeded after ``timeout`` seconds (None: as long as the calls' own deadlines allow).
        """
        try:
            return self._outcome(timeout)[0]
        except TimeoutError:
            raise DeadlineExceeded(f"the store did not finish within {timeout} s") from None

    @property
    def is_done(self) -> bool:
        return self._future.done()

    @property
    def stored_token_count(self) -> int:
        """Leading tokens that are resident now. Waits like ``wait()``."""
        return self._outcome()[1]

    @property
    def reason(self) -> str:
        """Why less than everything was kept; empty otherwise. Waits like ``wait()``."""
        return self._outcome()[2]
