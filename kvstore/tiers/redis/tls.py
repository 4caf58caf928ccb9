"""Encrypted connections of redis-py whose certificates may be renewed while the service runs."""

from __future__ import annotations

from typing import Any

from redis.asyncio.connection import SSLConnection
from redis.exceptions import AuthenticationError

from kvstore.errors import Unavailable
from kvstore.tiers.redis.access import Access


def renewable(kind: type[SSLConnection], access: Access) -> type[SSLConnection]:
    """Return connections of this kind that read the files of ``access`` at each connect, and trust its authority alone.
    redis-py's own read them once, connect again and again with what they read, and trust the system's authorities,
    too."""

    class Renewable(kind):  # type: ignore[valid-type, misc]  # one of redis-py's
        def _connection_arguments(self) -> Any:
            try:
                self.ssl_context.context = access.tls()
            except Unavailable as error:  # as for credentials: redis-py takes it for a refusal
                raise AuthenticationError(error.message) from error
            return super()._connection_arguments()

    return Renewable
