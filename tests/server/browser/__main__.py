"""Starts a sidecar and its load, and has the browser look."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from kvstore_client import Client, ModelSpec, connect
from kvstore_client.loading import call as calls
from kvstore_client.prompt import Prompt
from kvstore_ops.sidecar import Sidecar

from kvstore.planning.loading import Prefill, Way
from tests.server.test_web import HOSTILE, port_of
from tests.specs import random_cache, small_spec, tokens_of

SPEC, EVIL = small_spec(model_id="house/model-one"), small_spec(model_id=HOSTILE, weights_digest="cd" * 32)
LOOK = Path(__file__).parent / "look.cjs"
FIRST_S = 25.0
"""Two intervals of the page's history."""


def load(client: Client, is_over: threading.Event) -> None:
    """Store and fetch contexts of both models, some of which are not there."""
    number = 0
    while not is_over.wait(0.05):
        number += 1
        spec, tokens = (SPEC, EVIL)[number % 2], tokens_of(64, number % 7)
        if number % 3:
            client.store(spec, tokens, random_cache(spec, 64, number % 7))
        client.fetch(spec, tokens)


def plan(client: Client, spec: ModelSpec, number: int) -> None:
    """A partial prefill that ended, or still goes on."""
    prompt = Prompt.of(spec, tokens_of(65, number), (), None)
    begun = client.planner.begin(prompt, calls.Asked(64, 0, frozenset(Way), "on"))
    if begun is not None:
        with begun as call:
            call.end(0.4 + number / 10, 0.1, is_given_up=False, computed=None)
            time.sleep(0.3)  # the word arrives before the call's end does


def main(pictures: str, modules: str) -> int:
    """Return the browser's verdict."""
    is_over = threading.Event()
    with Sidecar("--capacity", "16 MiB", "--metrics-port", "0", nvme="32 MiB") as sidecar:
        with connect(sidecar.address, planning="on") as client:
            for spec in (SPEC, EVIL):
                for seed in range(7):
                    client.store(spec, tokens_of(64, seed), random_cache(spec, 64, seed)).wait(10)
                for _ in range(20):
                    client.planner.computed(spec, 0, Prefill(1000, 0, 1.0))
                for number in range(3):
                    plan(client, spec, number)
            thread = threading.Thread(target=load, args=(client, is_over))
            thread.start()
            try:
                time.sleep(FIRST_S)
                url = f"http://127.0.0.1:{port_of(sidecar)}/"
                return subprocess.run(["node", str(LOOK), url, pictures, modules], check=False).returncode
            finally:
                is_over.set()
                thread.join()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
