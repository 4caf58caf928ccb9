"""A client makes a call again that gives something back and that the sidecar did not take."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from kvstore_client.planes.returns import Returns
from kvstore_client.planes.session import ClientSession

from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest, KVStoreError, Unavailable

WAIT_S = 20.0
UNANSWERED = [Exhausted, Unavailable, DeadlineExceeded]


class Sidecar:
    """Refuses the first call."""

    def __init__(self, refusal: type[KVStoreError]) -> None:
        self._refusals = [refusal("busy")]
        self.calls: list[list[int]] = []
        self.given_back: list[list[int]] = []

    def release(self, lease_ids: list[int]) -> None:
        self.calls.append(lease_ids)
        if self._refusals:
            raise self._refusals.pop()
        self.given_back.append(lease_ids)


@pytest.fixture
def returns() -> Iterator[Returns]:
    ended = threading.Event()
    returns = Returns(ended)
    yield returns
    ended.set()
    returns.close()


@pytest.mark.parametrize("refusal", UNANSWERED)
def test_leases_that_a_busy_sidecar_did_not_take_are_offered_again(
    returns: Returns, refusal: type[KVStoreError]
) -> None:
    sidecar = Sidecar(refusal)
    returns.start(sidecar.release)
    returns.lease(7)
    assert returns.settle(WAIT_S)
    assert sidecar.given_back == [[7]]


@pytest.mark.parametrize("refusal", UNANSWERED)
def test_a_store_whose_abort_was_refused_is_aborted_later(refusal: type[KVStoreError]) -> None:
    """The caller hears of the refusal, and does not wait."""
    sidecar, session = Sidecar(refusal), ClientSession()
    session.returns.start(sidecar.release)
    with pytest.raises(refusal):
        session.give_back(lambda: sidecar.release([3]))
    assert session.returns.settle(WAIT_S)
    assert sidecar.given_back == [[3]]
    session.ended.set()
    session.returns.close()


def test_what_the_sidecar_does_not_know_any_more_is_not_offered_again(returns: Returns) -> None:
    sidecar = Sidecar(InvalidRequest)
    returns.start(sidecar.release)
    returns.lease(7)
    assert returns.settle(WAIT_S)
    assert (sidecar.calls, sidecar.given_back) == ([[7]], [])
