"""The shared parts of a client that its calls use."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

from kvstore.errors import Unavailable
from kvstore.seams import Clock, FaultPoints, Workers, WorkerThreads
from kvstore.seams.jobs import begun
from kvstore.seams.scheduler import start_thread
from kvstore.spec import ModelSpec
from kvstore_client.connection import Connection, Miss
from kvstore_client.copying import Copier, commits_beside
from kvstore_client.planes.place import Place
from kvstore_client.planes.session import ClientSession


@dataclass(frozen=True, kw_only=True)
class Context:
    """``committer``: the worker that runs commits, one after another. ``timeout_s``: time limit of a call."""

    connection: Connection
    copier: Copier
    committer: Workers
    faults: FaultPoints
    clock: Clock
    timeout_s: float

    @staticmethod
    def begin(place: Place, clock: Clock, timeout_s: float) -> Context:
        """Return the context of a new client."""
        return Context(
            connection=Connection(place, clock, timeout_s), copier=Copier(), committer=_committer(),
            faults=FaultPoints(), clock=clock, timeout_s=timeout_s,
        )  # fmt: skip

    def with_threads(self) -> Context:
        """Return a copy of this context with new threads."""
        return replace(self, copier=Copier(), committer=_committer())

    def close(self) -> None:
        """Finish pending commits, for at most the timeout of a call, and end the session. Another thread waits for
        them without a bound: a signal handler may close a client whose lock its own thread has."""
        try:
            closing = start_thread(self._finish, "kvstore-closing")
        except Unavailable:
            pending: list[Future[Any]] = [*commits_beside(self.committer), begun(self.committer, int)]
            wait(pending, self.timeout_s)
            self.connection.close()
            self._finish()
            return
        closing.join(self.timeout_s)
        self.connection.close()  # what still waits for the sidecar ends now
        closing.join(self.timeout_s)

    def _finish(self) -> None:
        """Finish pending commits, and end the threads."""
        wait(commits_beside(self.committer))
        self.committer.close()
        self.copier.close()

    def count(self, name: str, amount: int = 1) -> None:
        """See ``Connection.count``."""
        self.connection.count(name, amount)

    def ready(self, spec: ModelSpec) -> tuple[ClientSession, bytes]:
        """See ``Connection.ready``."""
        return self.connection.ready(spec)

    def or_miss(self) -> Miss:
        """See ``Connection.or_miss``."""
        return self.connection.or_miss()


def _committer() -> Workers:
    return WorkerThreads(1, "kvstore-commit")
