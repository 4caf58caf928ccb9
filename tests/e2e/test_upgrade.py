"""An older release's data in place: it writes, this one reads, checks and writes, and the older reads all again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kvstore_ops.sidecar import Sidecar

from kvstore import __version__
from tests.conftest import CLIENTS, ROOT, WARM
from tests.ops.command import run
from tests.warm import Warm

OLDER = "c6432dd"
ROOMS = ("kvstore", "clients", "ops")
CLIENT = """
import os
import sys
import kvstore
import kvstore_client
import kvstore_ops
import numpy as np
from kvstore_client import ModelSpec, connect
from kvstore.errors import InvalidRequest
homes = {each.__file__[: len(os.getcwd())] for each in (kvstore, kvstore_client, kvstore_ops)}
assert homes == {os.getcwd()}, homes
address, word, seeds = sys.argv[1], sys.argv[2], [int(each) for each in sys.argv[3].split(",")]
spec = ModelSpec.dense("upgraded", "unverified:upgraded", layer_count=2, kv_heads=2, head_dim=64, hidden_size=128,
                       vocab_size=1 << 16, cache_dtype="float16", chunk_tokens=64)
with connect(address) as client:
    for seed in seeds:
        random = np.random.default_rng(seed)
        tokens = random.integers(0, 1 << 16, 200)
        cache = [tuple(random.random((2, 200, 64), np.float32).astype(np.float16) for _ in range(2)) for _ in range(2)]
        if word == "store":
            assert client.store(spec, tokens, cache).wait(20).name == "LOCAL"
            continue
        if word == "locate":
            try:
                client.locate(spec, tokens)
            except InvalidRequest as error:
                print(error.message)
            continue
        found = client.fetch(spec, tokens, verify=True)
        assert found.token_count == 200, (seed, found.token_count, found.reason)
        for layer, stored in zip(found, cache, strict=True):
            for got, put in zip(layer, stored, strict=True):
                assert np.array_equal(np.asarray(got).view(np.uint16), put.view(np.uint16)), seed
"""


class Older(NamedTuple):
    """The tree of the older release, and what starts clients of it."""

    home: Path
    clients: Warm


def path_of(home: Path) -> dict[str, str]:
    """Return what has Python find a release in this tree."""
    return {"PYTHONPATH": os.pathsep.join(map(str, (home, home / "clients", home / "ops")))}


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Older]:
    place = tmp_path_factory.mktemp("older")
    asked = ["git", "-C", str(ROOT), "archive", OLDER, *ROOMS]
    try:
        packed = subprocess.run(asked, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"commit {OLDER} is not here: this is no clone with the whole history")
    subprocess.run(["tar", "-x", "-C", str(place)], input=packed, check=True, timeout=60)
    own = Warm("kvstore_client", "kvstore_ops", directory=place, environment={**os.environ, **path_of(place)})
    yield Older(place, own)
    own.close()


class Releases:
    """A sidecar whose release changes between a stop and a start, and clients of either."""

    def __init__(self, older: Older, plane: str) -> None:
        self._homes = {"older": older.home, "this": ROOT}
        self._clients = {"older": older.clients, "this": CLIENTS}
        self.sidecar = Sidecar("--capacity", "16 MiB", nvme="32 MiB", plane=plane)

    def _environment(self, release: str) -> dict[str, str]:
        return {**os.environ, **(path_of(self._homes[release]) if release == "older" else {})}

    def start(self, release: str) -> None:
        home, popen = self._homes[release], subprocess.Popen if release == "older" else WARM.popen

        # What a sidecar is started by is one of two classes, which no type checker follows to a base.
        class There(popen):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, cwd=home, **options)

        self.sidecar.environment, self.sidecar.launch = self._environment(release), There
        self.sidecar.start()

    def client(self, release: str, word: str, *seeds: int) -> str:
        command = [sys.executable, "-c", CLIENT, self.sidecar.address, word, ",".join(map(str, seeds))]
        done = self._clients[release].run(
            command, timeout=100, cwd=self._homes[release], env=self._environment(release)
        )
        assert done.returncode == 0, (release, word, done.stderr)
        return done.stdout


def test_what_an_older_release_wrote_stays_and_it_reads_what_this_one_wrote(older: Older, plane: str) -> None:
    releases = Releases(older, plane)
    sidecar = releases.sidecar
    try:
        releases.start("older")
        releases.client("older", "store", 1, 2)
        sidecar.stop()
        releases.start("this")
        releases.client("this", "fetch", 1, 2)
        socket = sidecar.socket_address.removeprefix("unix://")
        read = run("verify", "--tier", "nvme", "--socket", socket, "--json")
        assert read.code == 0, read.err
        assert read.json["outcomes"]["nvme: read"]["chunk_count"] == 8
        releases.client("this", "store", 3)
        releases.client("older", "fetch", 1, 3)  # engines are of the older release for a while
        sidecar.stop()
        releases.start("older")
        releases.client("older", "fetch", 1, 2, 3)
    finally:
        sidecar.stop()


def test_a_client_of_this_release_works_with_an_older_sidecar(older: Older, plane: str) -> None:
    """Engines may be upgraded before their node is: stores, fetches by a call, and fetches without one. A
    call that the sidecar does not know is an error that names both."""
    releases = Releases(older, plane)
    try:
        releases.start("older")
        releases.client("this", "store", 4, 5)
        releases.client("this", "fetch", 4, 5, 4, 5)
        releases.client("older", "fetch", 4, 5)
        said = releases.client("this", "locate", 4)
        assert f"of release {__version__}, sends: run a sidecar of the client's release" in said
        assert "the sidecar, of release 0.1.0, does not know LocateRequest" in said
    finally:
        releases.sidecar.stop()
