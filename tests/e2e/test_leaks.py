"""Engine processes come, do everything at once, and are killed anywhere: nothing of them is left in the sidecar."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvstore_client import Client, connect
from kvstore_ops.sidecar import Sidecar

from tests.conftest import CLIENTS

REQUESTS = 10_000 if os.environ.get("KVSTORE_TEST_SCALE") == "full" else 300
PROCESSES = 3
ENGINE = """
import random, sys
import numpy as np
from kvstore.errors import KVStoreError
from kvstore_client import Paged, connect
from tests.specs import random_cache, small_spec, tokens_of

address, seed = sys.argv[1], int(sys.argv[2])
chance = random.Random(seed)
spec, count = small_spec(), 100
tokens = [tokens_of(count, seed=number) for number in range(40)]
cache = random_cache(spec, count)

def pages():
    return Paged([np.zeros((2, 7, 16, 2, 8), np.uint16) for _ in range(2)], np.arange(count))

def store(client, prompt):
    client.store(spec, prompt, cache)

def fetch(client, prompt):
    client.fetch(spec, prompt, into=pages() if chance.random() < 0.5 else None)

def stream(client, prompt):
    for layer, _ in client.fetch_layers(spec, prompt):
        if chance.random() < 0.2:
            break

def hold(client, prompt):
    match = client.lookup(spec, prompt, hold=True, readers=chance.randint(1, 3))
    if match.ticket and chance.random() < 0.7:
        transfer = client.start_fetch(match.ticket, into=None)
        if chance.random() < 0.3:
            transfer.cancel()
        elif chance.random() < 0.7:
            transfer.wait(10.0)
    elif match.ticket and chance.random() < 0.5:
        client.release_ticket(match.ticket)

def write(client, prompt):
    writer = client.start_store(spec, prompt, shards=chance.choice((1, 1, 2)))
    joined = client.start_fetch(writer.ticket, into=pages()) if writer.ticket and chance.random() < 0.5 else None
    for layer in range(chance.randint(0, 2)):
        writer.put_layer(layer, cache[layer])
    if chance.random() < 0.5:
        writer.commit()
    else:
        writer.abort()
    if joined is not None and chance.random() < 0.5:
        joined.cancel()

with connect(address) as client:
    print("ready", flush=True)
    while True:
        try:
            chance.choices((store, fetch, stream, hold, write), (3, 4, 2, 3, 3))[0](client, chance.choice(tokens))
        except KVStoreError as error:
            print(f"{type(error).__name__}: {error.message}", file=sys.stderr, flush=True)
        print(".", flush=True)
"""


def left(client: Client) -> dict[str, int]:
    """What the sidecar keeps for clients, and for this one alone there should be nothing."""
    stats = client.stats()
    sessions, arena = stats.sessions, stats.arena
    return {
        "other sessions": sessions.session_count - 1,
        "reservations": sessions.reservation_count,
        "leases": sessions.lease_count,
        "staging": sessions.staging_bytes,
        "streams": sessions.stream_count,
        "tickets": sessions.ticket_count,
        "leased": arena.leased_bytes,
        "reserved": arena.reserved_bytes,
        "loading": stats.loading_bytes,
    }


def account(process: subprocess.Popen[str]) -> tuple[int, int]:
    """(private KiB, threads) of the server."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    return int(values["RssAnon"].split()[0]), int(values["Threads"])


@pytest.mark.slow
def test_nothing_is_left_of_engines_that_were_killed() -> None:
    chance = random.Random(5)
    sidecar = Sidecar("--capacity", "8 MiB", nvme="16 MiB")
    sidecar.environment = {**os.environ, "KVSTORE__LIMITS__TICKET_AGE_S_MAX": "1"}
    with sidecar, connect(sidecar.address) as client:
        assert sidecar.process is not None
        warm = _run(sidecar, chance, REQUESTS // 5)
        before, descriptors = account(sidecar.process), client.stats().descriptor_count
        done = warm + _run(sidecar, chance, REQUESTS - warm)
        assert done >= REQUESTS
        until = time.monotonic() + 30.0
        while any(left(client).values()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(left(client).values()), left(client)
        after = account(sidecar.process)
        assert after[0] < before[0] + 16 * 1024, f"private memory grew from {before[0]} to {after[0]} KiB"
        assert after[1] <= before[1] + 2, f"threads: {before[1]}, then {after[1]}"
        assert client.stats().descriptor_count <= descriptors + 2
        counters = client.stats().counters
        assert counters["store_committed_chunks"] > 0
        assert counters["tickets_redeemed"] > 0
        assert counters["fetch_joined_stores"] > 0


def _run(sidecar: Sidecar, chance: random.Random, requests: int) -> int:
    """Engines, killed after some requests each, until they have done so many. Returns how many it were."""
    done = 0
    while done < requests:
        engines = [_engine(sidecar, chance.randrange(1 << 30)) for _ in range(PROCESSES)]
        try:
            for engine in engines:
                assert engine.stdout is not None
                for _ in range(chance.randint(20, 200)):
                    assert engine.stdout.readline() in (".\n", "ready\n"), "an engine failed"
                    done += 1
                if chance.random() < 0.5:
                    time.sleep(chance.uniform(0, 0.01))
                engine.kill()
        finally:
            for engine in engines:
                engine.kill()
                engine.communicate(timeout=20)
    return done


def _engine(sidecar: Sidecar, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ENGINE, sidecar.address, str(seed)]
    return CLIENTS.popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
