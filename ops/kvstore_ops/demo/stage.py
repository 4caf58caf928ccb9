"""Runs the scenes, each in its own process, and says whether the demo kept its promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from kvstore.errors import Unavailable
from kvstore_ops.demo.scene import Outcome
from kvstore_ops.demo.show import picture, table
from kvstore_ops.sidecar import Sidecar

SCENES = ("cold", "warm")
PICTURE = Path("kvstore-demo.png")
CAPACITY = "512 MiB"


def perform(address: str, name: str, console: Console) -> Outcome:
    """One engine process. Raises Unavailable with its last words when it fails."""
    command = [sys.executable, "-m", "kvstore_ops.demo.scene", address, name]
    outcome: Outcome | None = None
    with (
        console.status(f"{name}: starting an engine") as status,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            message = json.loads(line)
            if "stage" in message:
                status.update(f"{name}: {message['stage']}")
                if not console.is_terminal:
                    console.print(f"  {name}: {message['stage']}")
            else:
                outcome = Outcome(**message["outcome"])
        words = process.stderr.read()
    if outcome is None:
        raise Unavailable(f"the {name} scene failed: {words[-800:]}")
    return outcome


def main() -> int:
    """0 when the warm scene reused the prompt and said the same tokens; 1 otherwise."""
    console = Console()
    console.print("kvstore demo: one prompt of 4,160 tokens, asked by two engine processes in turn")
    with Sidecar("--capacity", CAPACITY) as sidecar:
        console.print(f"  sidecar: pid {sidecar.pid}, {sidecar.address}")
        with console.status("sidecar: pre-faulting its arena"):
            sidecar.wait_prefaulted()
        outcomes = [perform(sidecar.address, name, console) for name in SCENES]
    console.print(table(outcomes))
    picture(outcomes, PICTURE)
    console.print(f"timelines: {PICTURE}")
    return verdict(outcomes, console)


def verdict(outcomes: list[Outcome], console: Console) -> int:
    """Say plainly when the promise was not kept."""
    cold, *others = outcomes
    for each in others:
        if each.tokens != cold.tokens:
            console.print(f"[red]{each.name}: other tokens than cold: {each.tokens} against {cold.tokens}")
            return 1
        if not each.reused_token_count:
            console.print(f"[red]{each.name}: nothing was reused")
            return 1
    return 0
