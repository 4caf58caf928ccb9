"""Certificates and authorities that are renewed while the service runs. Real servers, behind lines with TLS."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import pytest

from kvstore.config import RedisAddress, RedisSettings
from kvstore.tiers.redis.access import Access
from kvstore.tiers.redis.topology import topology_of
from tests.fakes.proxy import Proxy
from tests.fakes.redis_server import RedisServer
from tests.fakes.tls import encrypted, made_certificates
from tests.ports import free_port
from tests.tiers.redis.test_topology import SLOT_COUNT

FILES = {"ca_file": "ca.crt", "certificate_file": "client.crt", "key_file": "client.key"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The certificates of two authorities that do not know each other."""
    found = [tmp_path_factory.mktemp(name) for name in ("former", "renewed")]
    for each in found:
        made_certificates(each)
    return found


@pytest.mark.parametrize("kind", ["server", "sentinel", "cluster"])
async def test_renewed_certificates_are_used_from_the_next_connect_on(
    places: list[Path], tmp_path: Path, kind: str
) -> None:
    """Whatever was kept of the former ones, every line that is made anew has the new ones."""
    async with AsyncExitStack() as stack:
        port = free_port()
        front = stack.enter_context(Proxy(("127.0.0.1", port)))
        options = ("--cluster-enabled", "yes", "--cluster-announce-port", str(front.address[1]))
        engine = stack.enter_context(RedisServer(*(options if kind == "cluster" else ()), port=port))
        doors = [await stack.enter_async_context(door_to(engine, place)) for place in places]
        front.lead_to(("127.0.0.1", doors[0]))
        fronts = [(front, doors[1])]
        url = "rediss://{}:{}".format(*front.address)
        if kind == "cluster":
            engine.client().execute_command("CLUSTER", "ADDSLOTS", *range(SLOT_COUNT))
            url = url.replace("rediss", "rediss+cluster")
        if kind == "sentinel":
            sentinel = stack.enter_context(RedisServer(port=free_port(), is_sentinel=True))
            sentinel.client().execute_command("SENTINEL", "MONITOR", "main", *front.address, 1)
            asked = [await stack.enter_async_context(door_to(sentinel, place)) for place in places]
            watching = stack.enter_context(Proxy(("127.0.0.1", asked[0])))
            fronts.append((watching, asked[1]))
            url = "rediss+sentinel://{}:{}/main".format(*watching.address)
        files = {name: str(tmp_path / file) for name, file in FILES.items()}
        settings = RedisSettings(url=url, **files)
        use(places[0], tmp_path)
        topology = topology_of(settings, RedisAddress.of(url), 2)
        assert await topology.client.ping()
        use(places[1], tmp_path)
        for each, renewed in fronts:
            each.cut()
            each.mend()
            each.lead_to(("127.0.0.1", renewed))
        async with asyncio.timeout(20.0):
            assert await topology.client.ping()
        await topology.close()


def test_files_are_read_once_in_each_of_their_states(places: list[Path], tmp_path: Path) -> None:
    """The system's authorities are many: to read them at each connect would hold up the service."""
    use(places[0], tmp_path)
    files = {name: str(tmp_path / file) for name, file in FILES.items()}
    for access in (Access(is_tls=True, **files), Access(is_tls=True)):
        former = access.tls()
        assert access.tls() is former
        use(places[1], tmp_path)
        assert (access.tls() is former) == (not access.ca_file)


def door_to(server: RedisServer, place: Path) -> AbstractAsyncContextManager[int]:
    """A port with TLS, with the certificates of ``place``."""
    return encrypted(server.path, place, wants_certificate=True)


def use(place: Path, target: Path) -> None:
    """Put these certificates where the settings say."""
    for name in FILES.values():
        shutil.copy(place / name, target / name)
