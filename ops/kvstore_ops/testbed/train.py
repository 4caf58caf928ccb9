"""Training a testbed model: deterministic by step count, resumable, on one CPU thread.

Step t's batch is drawn from the seed, the depth and t alone, so a run needs no generator state, and a stopped run
continues from its last checkpoint with the same bits. That holds on one machine type with one torch build and this
thread count; elsewhere sums round differently, and a stage of the curriculum may begin a few steps earlier or later.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F  # noqa: N812 - the name everyone reads

from kvstore.errors import InvalidRequest
from kvstore_ops.testbed import task
from kvstore_ops.testbed.models import Phase, Recipe
from kvstore_ops.testbed.net import Geometry, Net, grow, initialise

BATCH = 32
WARM_UP_STEPS = 50
FLOOR = 0.03
CLIP = 1.0
PASS = 0.93
EARLIER = 0.2
DROP = 0.15
WINDOW = 4
WINDOWED_STAGES = 2
CHECKPOINT_STEPS = 50

CURRICULUM = (
    task.Shape(chunks=1, references=0.0, hops=0, questions=12),
    task.Shape(chunks=2, references=0.0, hops=0, questions=12),
    task.Shape(chunks=2, references=0.5, hops=1, questions=12),
    task.Shape(chunks=3, references=0.6, hops=2, questions=10),
    task.Shape(chunks=4, references=0.6, hops=3, questions=10),
    task.Shape(chunks=6, references=0.6, hops=3, questions=8),
)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run: finished steps, the curriculum's stage, and the running accuracy on its questions."""

    step: int = 0
    stage: int = 0
    accuracy: float = 0.0


def rate(phases: tuple[Phase, ...], step: int) -> tuple[float, Phase]:
    """Return the learning rate of a step, and the phase of the step. Raises InvalidRequest past the last phase."""
    for phase in phases:
        if step < phase.steps:
            warm = min(1.0, (step + 1) / min(WARM_UP_STEPS, phase.steps))
            down = 0.5 * (1 + math.cos(math.pi * step / (phase.span or phase.steps)))
            return phase.rate * warm * (FLOOR + (1 - FLOOR) * down), phase
        step -= phase.steps
    raise InvalidRequest(f"step is past the end of the recipe by {step} steps")


class Run:
    """A model in training: net, optimiser and progress, kept in one checkpoint file."""

    def __init__(self, recipe: Recipe, checkpoint: Path, start: dict[str, torch.Tensor] | None) -> None:
        self.recipe = recipe
        self.checkpoint = checkpoint
        self.steps = sum(phase.steps for phase in recipe.phases)
        self.net = Net(Geometry(layers=recipe.layers))
        if start is None:
            initialise(self.net, recipe.seed)
            if recipe.phases[0].tied:
                self.net.repeat()
        else:
            self.net.adopt(grow(start, recipe.layers))
        self._answers = torch.tensor([*recipe.answers, *range(task.VALUES, task.VOCABULARY)])
        parameters = list(self.net.tensors_by_name().values())
        self.optimiser = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
                {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.98),
            fused=True,
        )
        self.progress = Progress(stage=recipe.phases[0].stages[0])
        if checkpoint.exists():
            self._resume()

    def step(self) -> float:
        """Do one step, and return its loss."""
        now = self.progress
        learning_rate, phase = rate(self.recipe.phases, now.step)
        first, last = phase.stages
        stage = min(max(now.stage, first), last)
        random = np.random.default_rng([self.recipe.seed, self.recipe.layers, now.step])
        drawn = int(random.integers(stage)) if stage and first < last and random.random() < EARLIER else stage
        shape = CURRICULUM[drawn]
        dropped = int(random.integers(1, shape.chunks)) if shape.chunks > 1 and random.random() < DROP else 0
        contexts = task.generate(random, BATCH, shape, dropped=dropped)
        tokens, labels = torch.from_numpy(contexts.tokens), torch.from_numpy(contexts.labels)
        at = (labels.reshape(-1) != task.NO_LABEL).nonzero()[:, 0]
        wanted = self._answers[labels.reshape(-1)[at]]
        window = WINDOW if stage < WINDOWED_STAGES else None
        logits = self.net(tokens, at, window=window)
        loss = F.cross_entropy(logits, wanted)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate
        self.optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        if phase.tied:
            self.net.share_gradients()
        torch.nn.utils.clip_grad_norm_(list(self.net.tensors_by_name().values()), CLIP)
        self.optimiser.step()
        asked = at % tokens.shape[1] >= contexts.context_tokens
        right = (logits.argmax(-1) == wanted)[asked].float().mean().item()
        accuracy = now.accuracy
        if drawn == stage and not dropped:
            accuracy = 0.9 * accuracy + 0.1 * right
        if stage < last and accuracy > PASS:
            stage, accuracy = stage + 1, 0.0
        self.progress = Progress(step=now.step + 1, stage=stage, accuracy=accuracy)
        return loss.item()

    def save(self) -> None:
        """Write the checkpoint atomically: a run that is stopped meanwhile keeps the checkpoint before."""
        tensors = {f"net.{name}": p.detach().clone() for name, p in self.net.tensors_by_name().items()}
        for name, p in self.net.tensors_by_name().items():
            state = self.optimiser.state.get(p, {})
            tensors |= {f"{part}.{name}": state[part] for part in ("exp_avg", "exp_avg_sq", "step") if part in state}
        beside = self.checkpoint.with_suffix(".tmp")
        save_file(tensors, beside, {"progress": json.dumps(vars(self.progress)), "recipe": repr(self.recipe)})
        os.replace(beside, self.checkpoint)

    def _resume(self) -> None:
        with safe_open(self.checkpoint, "pt") as opened:
            about = opened.metadata()
        if about["recipe"] != repr(self.recipe):
            raise InvalidRequest(f"{self.checkpoint} was made by another recipe: remove it to start afresh")
        tensors = load_file(self.checkpoint)
        by_name = self.net.tensors_by_name()
        self.net.adopt({name: tensors[f"net.{name}"] for name in by_name})
        for name, p in by_name.items():
            self.optimiser.state[p] = {part: tensors[f"{part}.{name}"] for part in ("exp_avg", "exp_avg_sq", "step")}
        self.progress = Progress(**json.loads(about["progress"]))


def train(
    recipe: Recipe,
    checkpoint: Path,
    start: dict[str, torch.Tensor] | None,
    report: Callable[[str], None],
) -> Net:
    """Train to the recipe's last step, from the checkpoint where there is one, and return the net."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    run = Run(recipe, checkpoint, start)
    report(f"{recipe.name}: step {run.progress.step} of {run.steps}")
    began = time.perf_counter()
    losses: list[float] = []
    while run.progress.step < run.steps:
        losses.append(run.step())
        now = run.progress
        if len(losses) == 20 or now.step == run.steps:
            seconds = (time.perf_counter() - began) / len(losses)
            report(
                f"{recipe.name}: step {now.step}/{run.steps} stage {now.stage} loss {sum(losses) / len(losses):.3f} "
                f"running accuracy {now.accuracy:.3f}, {seconds:.2f} s a step"
            )
            losses, began = [], time.perf_counter()
        if now.step % CHECKPOINT_STEPS == 0 or now.step == run.steps:
            run.save()
    return run.net
