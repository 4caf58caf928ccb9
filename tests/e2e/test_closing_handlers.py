"""A signal handler, as an engine's for SIGTERM, closes a client in the midst of what its own thread does with it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from kvstore_client import Client, connect
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Unavailable
from kvstore.spec import MissReason
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec()
WHILE_IT_CONNECTS = """
import faulthandler, os, signal, sys
faulthandler.dump_traceback_later(30.0, exit=True)
from kvstore_client import connect
from kvstore.errors import DeadlineExceeded, Unavailable

sidecar_pid = int(sys.argv[2])
client = connect(sys.argv[1], timeout_s=1.0)
client.connect_now().close()  # it connects again at its next call
signal.signal(signal.SIGALRM, lambda *_: client.close())
os.kill(sidecar_pid, signal.SIGSTOP)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    client.connect_now()
    raise AssertionError("nobody answers")
except (DeadlineExceeded, Unavailable):
    pass
finally:
    os.kill(sidecar_pid, signal.SIGCONT)
try:
    client.connect_now()
    raise AssertionError("it was closed")
except Unavailable as error:
    assert "closed" in str(error), error
print("through")
"""


def test_it_may_close_a_client_that_connects(sidecar: Sidecar) -> None:
    command = [sys.executable, "-c", WHILE_IT_CONNECTS, sidecar.address, str(sidecar.pid)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert result.stdout == "through\n", result.stderr[-2000:]


def locks_of(client: Client) -> dict[str, Any]:
    connection: Any = client._context.connection
    session = connection.session()
    return {
        "connection": connection._lock,
        "counters": connection._counting,
        "known": session.warm._changing,
        "uses": session.presence._counting,
    }


def test_it_may_close_a_client_that_has_a_lock(local_sidecar: Sidecar) -> None:
    tokens = tokens_of(2 * SPEC.chunk_tokens)
    for name in ("connection", "counters", "known", "uses"):
        with connect(local_sidecar.address) as client:
            client.store(SPEC, tokens, random_cache(SPEC, len(tokens))).wait()
            reasons: list[MissReason] = []

            def close(client: Client = client, name: str = name, reasons: list[MissReason] = reasons) -> None:
                with locks_of(client)[name]:
                    client.close()
                    reasons.append(client.fetch(SPEC, tokens).reason)

            assert is_ended(close), name
            assert reasons == [MissReason.UNAVAILABLE]


@pytest.mark.parametrize("what", ["staging", "threads"])
def test_a_close_ends_where_other_threads_wait_for_a_lock_of_its_own(local_sidecar: Sidecar, what: str) -> None:
    tokens = tokens_of(2 * SPEC.chunk_tokens, 7)
    with connect(local_sidecar.address, timeout_s=0.2) as client:
        go, committer = threading.Event(), cast(Any, client._context.committer)
        committer.submit(go.wait, 60.0)
        client.store(SPEC, tokens, random_cache(SPEC, len(tokens)))
        locks = {"staging": cast(Any, client.connect_now().staging)._lock, "threads": committer._pool._shutdown_lock}

        def close() -> None:
            with locks[what]:
                go.set()
                client.close()

        assert is_ended(close, 5.0)


def test_a_close_ends_where_no_thread_can_be_had(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Unavailable("no threads")

    monkeypatch.setattr("kvstore_client.context.start_thread", refuse)
    with connect(sidecar.address, timeout_s=0.2) as client:
        client._context.committer.submit(client.connect_now().ended.wait, 60.0)
        assert is_ended(client.close, 5.0)


def test_what_connects_is_closed_with_its_client(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler runs when the session is there, before the connection has it."""
    with connect(sidecar.address) as client:
        place: Any = client._context.connection.place
        sessions, opened = [], type(place).open

        def open_and_close(self: Any, timeout_s: float) -> Any:
            sessions.append(opened(self, timeout_s))
            client.close()
            return sessions[0]

        client.connect_now().close()

        monkeypatch.setattr(type(place), "open", open_and_close)
        with pytest.raises(Unavailable, match="closed"):
            client.connect_now()
        assert not sessions[0].is_usable


def is_ended(work: Callable[[], None], timeout_s: float = 30.0) -> bool:
    """Do work on a thread that does not keep the process. True when it has come to its end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()
