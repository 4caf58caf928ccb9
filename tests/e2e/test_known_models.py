"""Models and pins are kept over restarts: what is on the device has its names and sizes before any engine comes."""

from __future__ import annotations

import numpy as np
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.spec import Durability
from tests.e2e.stored import STEP, Stored
from tests.ops.command import run
from tests.server.raw import eventually
from tests.specs import random_cache


def test_after_a_crash_operators_act_on_models_before_any_engine_comes() -> None:
    with Sidecar("--capacity", "8 MiB", nvme="32 MiB") as own:
        socket = own.address.removeprefix("unix://")
        with connect(own.address) as client:
            there = Stored(client, 2)
            hidden = {1: np.ones((STEP, there.spec.hidden_size), np.uint16)}
            cache = random_cache(there.spec, STEP, there.number)
            first = there.tokens[:STEP]
            assert client.store(there.spec, first, cache, hidden=hidden).wait(20) is Durability.LOCAL
            before = run("ls", "--model", there.name, "--json", "--socket", socket).json["chunks"]
            eventually((own.directory / "models" / "default.json").exists)
            assert run("pin", "--digest", there.digests[1], "--for", "1 h", "--socket", socket).code == 0
            eventually((own.directory / "pins" / "default.json").exists)
        own.stop(kill=True)
        own.start()
        (found,) = run("models", "--json", "--socket", socket).json
        assert (found["model_id"], found["chunk_count"]) == (there.name, 3)  # the E of a layer, too
        after = run("ls", "--model", there.name, "--json", "--socket", socket).json["chunks"]
        sizes = [sorted((each["digest"], each["byte_count"]) for each in listed) for listed in (before, after)]
        assert sizes[0] == sizes[1]
        done = run("verify", "--model", there.name, "--json", "--socket", socket)
        assert done.json["outcomes"] == {"nvme: read": {"chunk_count": 3, "byte_count": found["byte_count"]}}
        assert sum(each["is_pinned"] for each in after) == 2  # the last of the chain, and what it hangs on
        own.stop()
        own.start()  # a clean stop keeps it, too
        assert run("evict", "--model", there.name, "--yes", "--socket", socket).code == 10
        assert run("unpin", "--digest", there.digests[1], "--socket", socket).code == 0
        with connect(own.address) as client, client.watch() as events:
            there.client = client
            assert there.hit_count == 2 * STEP
            assert run("evict", "--model", there.name, "--yes", "--socket", socket).code == 0
            assert next(events).model_id == there.name
