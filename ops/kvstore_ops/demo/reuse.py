"""Two more scenes, without an exact prefix: documents that were cached one by one, and a prompt that only a sibling
model has seen. A small trained model answers, so that its accuracy shows the quality of the reused caches. The gate
chooses the recompute setting from the profiles that come with the model."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_client import Client
from rich.console import Console
from rich.table import Table

from kvstore.planning import Recompute
from kvstore_ops.demo.progress import progress

if TYPE_CHECKING:
    from kvstore_client.gate import Gate

MODEL, SENDER = "l12-s2", "l12-s2-plus3"
COUNT = 16
"""Prompts of each scene: the same number from every evaluation seed."""


@dataclass(frozen=True)
class Row:
    """The result of one way to answer a scene's prompts."""

    name: str
    accuracy: str
    share: float
    seconds: float
    reused: int


class Cast:
    """The receiver, its sibling, and the prompts. The client gets a gate with only the shipped profiles, in an empty
    ``directory``, so that no profile of this machine changes the scene."""

    def __init__(self, client: Client, directory: Path, count: int) -> None:
        import numpy as np
        import torch
        from kvstore_client.engines.transformers_runner import TransformersRunner

        from kvstore_ops.profiling.subject import spec_of
        from kvstore_ops.testbed import Shape, evaluation, load
        from kvstore_ops.testbed.task import generate

        self.client = client
        client.gate = shipped_gate(directory)
        self.model, self.recipe = load(MODEL, torch.float32)
        self.runner = TransformersRunner(self.model, spec=spec_of(MODEL))
        self.sender = TransformersRunner(load(SENDER, torch.float32)[0], spec=spec_of(SENDER))
        each = count // len(evaluation().numbers)
        self.prompts = [
            generate(np.random.default_rng(seed), each, Shape(), crossing_only=True) for seed in evaluation().numbers
        ]

    def alone(self, runner: Any, tokens: Any, hidden_layers: tuple[int, ...] = ()) -> Any:
        """Compute tokens alone, by a full prefill from position 0. The result has their KV, and E of the layers
        ``hidden_layers``."""
        from kvstore_client.recompute import recompute

        full = Recompute.full(runner.spec.layer_count)
        return recompute(runner, tokens, [], full, hidden_layers=hidden_layers)

    def answered(self, name: str, ask: Callable[[Any, int], Any]) -> Row:
        """Ask every prompt once, and return the row of results. ``ask`` returns an object with logits, share and
        plan."""
        import numpy as np

        from kvstore_ops.testbed.evaluate import expected, summary

        right, seconds, shares, reused = [], [], [], []
        for batch in self.prompts:
            wanted = expected(batch, self.recipe.answers)
            for tokens, answers in zip(batch.tokens, wanted, strict=True):
                started = time.perf_counter()
                done = ask(tokens, batch.suffix.shape[1])
                seconds.append(time.perf_counter() - started)
                right.append(done.logits[1::2].argmax(-1).numpy() == answers)
                shares.append(done.share)
                reused.append(done.plan.reused_token_count if hasattr(done, "plan") else 0)
        found = summary(np.stack(right))
        accuracy = f"{found.accuracy:.2f} +- {found.standard_error:.2f}"
        return Row(name, accuracy, statistics.mean(shares), statistics.median(seconds), int(statistics.median(reused)))

    def rows(self, kind: str, sender: Any, **known: Any) -> list[Row]:
        """Return the rows of full prefill, of plain reuse, and of reuse with the setting that the gate permits. The
        gate checks the first permitted request with a full prefill. That request is made before the rows, so that the
        last row shows only reuse."""
        from kvstore_client.recompute import recompute

        from kvstore_ops.profiling.profiler import told

        full = Recompute.full(self.runner.spec.layer_count)

        def plain(tokens: Any, count: int) -> Any:
            return recompute(self.runner, tokens, [], full, logit_count=count)

        def through(setting: Recompute | None) -> Callable[[Any, int], Any]:
            return lambda tokens, count: self.client.partial_prefill(
                self.runner, tokens, recompute=setting, logit_count=count, **known
            )

        permit = self.client.gate.permit(self.runner.spec, sender, kind)
        chosen = told(permit.setting) if permit.setting else f"in full: {permit.reason}"
        through(None)(self.prompts[0].tokens[0], self.prompts[0].suffix.shape[1])
        return [
            self.answered("full prefill", plain),
            self.answered("reused as it is", through(Recompute.reuse())),
            self.answered(f"by its profile: {chosen}", through(None)),
        ]

    def documents(self) -> list[Row]:
        """Play the scene of documents: each was computed alone, once, and now stands behind others."""
        bounds = list(pairwise(self.prompts[0].boundaries))
        for tokens in (tokens for batch in self.prompts for tokens in batch.context):
            for start, stop in bounds:
                alone = self.alone(self.runner, tokens[start:stop])
                self.client.store_segment(self.runner.spec, tokens[start:stop], alone.kv)
        return self.rows("position", None, segments=bounds)

    def sibling(self) -> list[Row]:
        """Play the scene of the sibling: a model that was fine-tuned to other answers has read the same context, and
        stored its KV, and E of the layer at which the profile's setting begins."""
        setting = self.client.gate.permit(self.runner.spec, self.sender.spec, "sibling").setting
        layers = (setting.first_layer,) if setting and setting.needs_hidden else ()
        for tokens in (tokens for batch in self.prompts for tokens in batch.context):
            made = self.alone(self.sender, tokens, layers)
            self.client.store(self.sender.spec, tokens, made.kv, hidden=made.hidden)
        return self.rows("sibling", self.sender.spec, senders=(self.sender.spec,))


def shipped_gate(directory: Path) -> Gate:
    """Return a gate with the receiver's shipped profiles."""
    from kvstore_client.gate import Gate
    from kvstore_client.gate.profiles import Profiles

    from kvstore.planning import Pair
    from kvstore.planning.permit import PROVENANCE
    from kvstore_ops.profiling.shipped import shipped_profile
    from kvstore_ops.profiling.subject import spec_of

    profiles = Profiles(directory)
    for kind, sender in (("position", None), ("sibling", SENDER)):
        pair = Pair.of(spec_of(MODEL), spec_of(sender) if sender else None, kind, PROVENANCE[kind])
        profiles.write(shipped_profile(MODEL, kind, sender), profiles.path(pair))
    return Gate(directory)


def perform(client: Client, console: Console, count: int = COUNT) -> None:
    """Play both scenes, and print a table for each."""
    with tempfile.TemporaryDirectory() as directory:
        with progress(console, "reuse: loading a small trained model and its sibling"):
            cast = Cast(client, Path(directory), count)
        _scenes(cast, console)
    console.print(
        "  a model of 1.8 M parameters, prompts of 208 tokens: the answers are shown, not the speed: a layer costs it "
        "less than a call. Speed: kvstore bench ttft-blend, ttft-sibling"
    )


def _scenes(cast: Cast, console: Console) -> None:
    from kvstore_ops.testbed.trial import one_thread

    scenes = {
        "documents: six in a prompt nobody asked before, each cached by itself": cast.documents,
        "sibling: a context that only another model has read, one fine-tuned to other answers": cast.sibling,
    }
    for title, scene in scenes.items():
        with progress(console, f"{title.partition(':')[0]}: answering prompts in three ways"), one_thread():
            rows = scene()
        table = Table("way", "right answers", "computed again", "time", "tokens reused")
        for row in rows:
            table.add_row(row.name, row.accuracy, f"{row.share:.0%}", f"{row.seconds * 1e3:.0f} ms", str(row.reused))
        console.print(f"\n{title}")
        console.print(table)
