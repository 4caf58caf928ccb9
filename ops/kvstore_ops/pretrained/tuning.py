"""The sibling: a fine-tune of the pretrained model, as users have many of one base model.

It learns to answer the same kind of question in another form. Every projection of every layer gets a low-rank addition
(LoRA, 2021), which is merged into the weights, so that all layers' caches differ from the base model's. The questions'
seed is not that of any benchmark. One thread and a fixed seed: on one machine the same weights come of it each time.

Cost: 3 s a step on one thread of an AVX2 processor; 1.2 GiB of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvstore.errors import InvalidRequest
from kvstore_ops.pretrained.place import Absent, pretrained, sibling
from kvstore_ops.pretrained.questions import Question, questions
from kvstore_ops.pretrained.unpack import placed

FORM = " {}, so says the document."
SEED = 417
STEPS, RATE, RANK = 96, 2e-3, 8
SIZES = [(2, 64), (3, 56), (1, 120)]
"""(documents, tokens of each) of the prompts."""
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Adapted(nn.Module):
    """A linear layer, frozen, and a low-rank addition, which is zero at the beginning."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + (x @ self.down.T) @ self.up.T
        return out

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        self.base.weight += self.up @ self.down
        return self.base


def tune(model: Any, prompts: Sequence[Question], report: Callable[[int, float], None], rate: float = RATE) -> None:
    """Fine-tune a model in place, a step for each prompt, on its answer's tokens. ``report`` gets the number of steps
    and the loss of the last."""
    adapted = _adapt(model)
    parameters = [each for _, _, layer in adapted for each in (layer.down, layer.up)]
    optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    for step, prompt in enumerate(prompts, start=1):
        part = min(1.0, step / 8) * 0.5 * (1 + math.cos(math.pi * step / (len(prompts) + 1)))
        for group in optimiser.param_groups:
            group["lr"] = rate * part
        ids = torch.tensor([[*prompt.tokens, *prompt.answer]])
        wanted = torch.tensor(prompt.answer)
        logits = model(ids[:, :-1], logits_to_keep=len(wanted), use_cache=False).logits[0]
        loss = nn.functional.cross_entropy(logits.float(), wanted)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        report(step, float(loss.detach()))
    for parent, name, layer in adapted:
        setattr(parent, name, layer.merged())


def _adapt(model: Any) -> list[tuple[Any, str, Adapted]]:
    """Put an addition beside every projection. Returns (module, attribute, addition) of each."""
    model.requires_grad_(False)
    found = []
    for layer in model.base_model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name in ADAPTED:
                if hasattr(parent, name):
                    made = Adapted(getattr(parent, name))
                    setattr(parent, name, made)
                    found.append((parent, name, made))
    return found


def make_sibling(target: Path, base: Path | None = None, steps: int = STEPS) -> Path:
    """Make the sibling in the directory ``target``, unless it is there already. Raises: InvalidRequest when there is no
    pretrained model, or the directory has something else in it; and the errors of ``placed``."""
    if not isinstance(sibling(target), Absent):
        return target
    source = pretrained(base)
    if isinstance(source, Absent):
        raise InvalidRequest(f"a sibling is made of the pretrained model: {source}")
    if target.exists() and any(target.iterdir()):
        raise InvalidRequest(f"{target} has something else in it: remove it, or name an empty directory")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvstore_ops.testbed.trial import one_thread

    with one_thread(), placed(target, f"{source.name}, {steps} steps, seed {SEED}") as made:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        torch.manual_seed(SEED)
        tune(model, list(questions(tokenizer, steps, SIZES, SEED, form=FORM)), _progress(steps))
        model.to(torch.bfloat16).save_pretrained(made)
        tokenizer.save_pretrained(made)
    return target


def _progress(steps: int) -> Callable[[int, float], None]:
    def report(step: int, loss: float) -> None:
        if step == 1 or step % 8 == 0:
            print(f"step {step} of {steps}, loss {loss:.2f}", flush=True)

    return report
