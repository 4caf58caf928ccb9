"""Finds the server that has a key: one server, the one that Sentinels name, or a cluster's nodes.

redis-py knows topologies; a byte mover is given one server, and connects to it itself.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError

from kvstore.config import RedisAddress, RedisSettings
from kvstore.errors import Unavailable
from kvstore.tiers.redis.access import Access, Server
from kvstore.tiers.redis.cluster import ClusterNodes
from kvstore.tiers.redis.line import CONNECT_S_MAX
from kvstore.tiers.redis.tls import renewable

SENTINEL_S_MAX = 1.0
"""A Sentinel that takes more seconds than this for an answer is asked again on a new line."""
SPARE_COUNT = 8
"""Connections to each node of a cluster beyond those of calls: a call fails where a connection is missing."""


class Topology(Protocol):
    """The servers that hold the keys."""

    @property
    def client(self) -> Any:
        """redis-py's client, for control."""

    @property
    def cluster(self) -> ClusterNodes | None:
        """The cluster, for questions whose keys may lie on several nodes; None where ``client`` reaches all keys."""

    async def server_of(self, key: bytes) -> Server:
        """Return the server that has a key. Raises redis-py's errors."""

    async def followed(self, key: bytes, said: str) -> Server:
        """Return the server that has a key after a server said ``said``: that another one has it. Raises as above."""

    def doubt(self) -> None:
        """Record that a server failed: another one may take its place."""

    async def reconnect(self) -> None:
        """Have ``client`` connect anew: it reached a replica. Connections outlive a change of the primary, and the name
        may lead to the new one. Raises nothing."""

    async def close(self) -> None: ...


def topology_of(settings: RedisSettings, address: RedisAddress, control_count: int) -> Topology:
    """Return the topology that the settings name. ``address``: the server, which may be the tier's own. Connects to
    nothing yet."""
    access = Access.of(settings, address)
    options = _options(access)
    if address.kind == "cluster":
        return ClusterNodes(address, access, {**options, "max_connections": control_count + SPARE_COUNT})
    if address.kind == "sentinel":
        asked = _options(Access.of_sentinels(settings, address)) | {"socket_timeout": SENTINEL_S_MAX}
        del asked["db"]
        return SentinelPrimary(address, access, options, asked)
    return SingleServer(address, access, options)


def _options(access: Access) -> dict[str, Any]:
    found: dict[str, Any] = {
        "protocol": 2,  # no unasked messages
        "socket_timeout": None,  # each call has a bound of its own
        "socket_connect_timeout": CONNECT_S_MAX,
        "retry": Retry(NoBackoff(), 1),  # on a connection that the server has closed
        "db": access.database,
    }
    if access.password or access.password_file:
        found["credential_provider"] = _Credentials(access)
    if access.is_tls:
        found["ssl"] = True  # ``tls`` says with which files
    return found


class _Credentials(CredentialProvider):
    """User and password, read anew at each connect."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def get_credentials(self) -> Any:
        try:
            return self._access.credentials()
        except Unavailable as error:  # after any other error redis-py keeps a connection without a user
            raise AuthenticationError(error.message) from error

    async def get_credentials_async(self) -> Any:
        return self.get_credentials()


def _renew_certificates(access: Access, *clients: Any) -> None:
    """Have clients without a cluster read the files of TLS at each connect, if they use it."""
    for pool in (each.connection_pool for each in clients if access.is_tls):
        pool.connection_class = renewable(pool.connection_class, access)


async def _close_idle(client: Any) -> None:
    """Close the connections that no call uses."""
    with suppress(RedisError, OSError):
        await client.connection_pool.disconnect(inuse_connections=False)


class SingleServer:
    """The one server that the URL names."""

    cluster: ClusterNodes | None = None

    def __init__(self, address: RedisAddress, access: Access, options: dict[str, Any]) -> None:
        if address.path:
            self._server = Server(access, path=address.path)
            place: dict[str, Any] = {"unix_socket_path": address.path}
        else:
            host, port = address.places[0]
            self._server = Server(access, host, port)
            place = {"host": host, "port": port}
        self.client: Any = Redis(**place, **options)
        _renew_certificates(access, self.client)

    async def server_of(self, key: bytes) -> Server:
        return self._server

    async def followed(self, key: bytes, said: str) -> Server:
        return self._server

    def doubt(self) -> None:
        return None

    async def reconnect(self) -> None:
        await _close_idle(self.client)

    async def close(self) -> None:
        await self.client.aclose()


class Sentinels(Sentinel):
    """Asks all Sentinels at once, for the first word on a primary counts. redis-py asks one after the other: one that
    stands still would keep the others from being asked. It also reorders its list, and calls side by side then lose
    Sentinels from it."""

    def __init__(self, *places: Any, **options: Any) -> None:
        super().__init__(*places, **options)  # type: ignore[no-untyped-call]  # as redis-py has it
        self._asked: dict[tuple[int, str], asyncio.Task[tuple[str, int] | str]] = {}
        """The questions on their way, by the Sentinel's number and the service: one each. None is cancelled, because
        redis-py may go on until its own timeout all the same, and the next caller waits for the same answer."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return the primary's host and port. Raises MasterNotFoundError where no Sentinel knows one."""
        said: list[str] = []
        asked = [self._question(number, service_name) for number in range(len(self.sentinels))]
        for answer in asyncio.as_completed(asked):
            found = await answer
            if not isinstance(found, str):
                return found
            said.append(found)
        raise MasterNotFoundError(f"no Sentinel names a primary of {service_name!r}: {'; '.join(sorted(said))}")

    async def close(self) -> None:
        """End the questions, each at its timeout at the latest, and close the lines."""
        asked = list(self._asked.values())
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for sentinel in self.sentinels:
            await sentinel.aclose()

    def _question(self, number: int, service_name: str) -> asyncio.Task[tuple[str, int] | str]:
        """Return the question to a Sentinel that is on its way, or a new one."""
        key = (number, service_name)
        if key not in self._asked:
            word = self._word_of(self.sentinels[number], service_name)
            self._asked[key] = asked = asyncio.get_running_loop().create_task(word)  # seam: ``close`` ends it
            asked.add_done_callback(lambda _: self._asked.pop(key))
        return self._asked[key]

    async def _word_of(self, sentinel: Any, service_name: str) -> tuple[str, int] | str:
        """Return a Sentinel's word on the primary, or the reason why it has none to give."""
        kwargs = sentinel.connection_pool.connection_kwargs
        place = f"{kwargs['host']}:{kwargs['port']}"
        try:
            state = (await sentinel.sentinel_masters()).get(service_name)
        except (RedisError, OSError) as error:
            return f"{place} does not answer ({type(error).__name__}: {error})"
        if not state:
            return f"{place} does not know it"
        if not self.check_master_state(state, service_name):
            return f"{place} says that it is down"
        return str(state["ip"]), int(state["port"])


class SentinelPrimary:
    """The primary of a service, as its Sentinels say at each connect. ``asked``: the options of lines to Sentinels."""

    cluster: ClusterNodes | None = None

    def __init__(
        self, address: RedisAddress, access: Access, options: dict[str, Any], asked: dict[str, Any]
    ) -> None:  # fmt: skip
        self._sentinel: Any = Sentinels(address.places, sentinel_kwargs=asked, **options)
        self._service = address.service
        self._access = access
        self._server: Server | None = None
        self.client: Any = self._sentinel.master_for(address.service)
        _renew_certificates(access, self.client, *self._sentinel.sentinels)

    async def server_of(self, key: bytes) -> Server:
        if self._server is None:
            host, port = await self._sentinel.discover_master(self._service)
            self._server = Server(self._access, host, port)
        return self._server

    async def followed(self, key: bytes, said: str) -> Server:
        self.doubt()
        return await self.server_of(key)

    def doubt(self) -> None:
        """Have the Sentinels asked again."""
        self._server = None

    async def reconnect(self) -> None:
        self.doubt()
        await _close_idle(self.client)

    async def close(self) -> None:
        await self.client.aclose()
        await self._sentinel.close()
