"""A sidecar that stands still under stores from other hosts: what they took comes back to them."""

from __future__ import annotations

import os
import signal
import threading

from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.spec import LayerSpec
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec(layers=(LayerSpec(kv_heads=8, k_dim=64, v_dim=64),) * 8, chunk_tokens=256)
COUNT = 4096
STALL_S, TIMEOUT_S = 1.2, 0.5


def test_a_store_that_is_given_up_gives_its_staging_back() -> None:
    kv = random_cache(SPEC, COUNT)
    with Sidecar("--capacity", "256 MiB", plane="remote") as sidecar:
        with connect(sidecar.address, timeout_s=TIMEOUT_S) as hasty, connect(sidecar.address, timeout_s=20.0) as calm:

            def stalled(seed: int) -> int:
                """Returns the staging of all sessions once the sidecar goes on."""
                with hasty.start_store(SPEC, tokens_of(COUNT, seed)) as writer:
                    for layer in range(3):
                        writer.put_layer(layer, kv[layer])
                    os.kill(sidecar.pid, signal.SIGSTOP)
                    going_on = threading.Timer(STALL_S, os.kill, (sidecar.pid, signal.SIGCONT))
                    going_on.start()
                    for layer in range(3, SPEC.layer_count):
                        writer.put_layer(layer, kv[layer])
                    writer.commit().stored_token_count  # noqa: B018 - waits until the store has ended
                    going_on.join()
                return int(calm.stats().sessions.staging_bytes)

            # How much one stall takes depends on the moment. What never came back would add to it each time.
            taken = [stalled(seed) for seed in range(6)]
            assert any(each <= max(taken[:number]) for number, each in enumerate(taken[1:], 1)), taken
            assert calm.store(SPEC, tokens_of(COUNT, 9), kv).stored_token_count == COUNT
