"""Who was promised what: every context that a client tried to store in one directory, and what it may expect back."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.crash.contexts import MODELS, Model


@dataclass(eq=False)
class Chain:
    """A context. ``promised``: leading tokens that a receipt called LOCAL. ``cap``: what may be expected at most,
    because a test damaged it."""

    model: Model
    tokens: Any
    promised: int = 0
    cap: int = 1 << 30
    is_damaged: bool = False

    def __str__(self) -> str:
        return f"{self.model.spec.model_id}[{len(self.tokens)} tokens, {self.tokens[0]} first]"

    @property
    def due(self) -> int:
        return min(self.promised, self.cap)


@dataclass
class Ledger:
    """The contexts of one directory. Shared by client threads."""

    chains: list[Chain] = field(default_factory=list)
    evicted: int = 0
    """Evictions from the device that were seen, all starts together."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fresh(self, random: np.random.Generator) -> Chain:
        """A context to store: all new, or after some chunks of another, or another and more."""
        model = MODELS[random.integers(len(MODELS))]
        step = model.spec.chunk_tokens
        count = step * int(random.integers(1, model.chunk_count_max + 1))
        if random.random() < 0.4:
            count += int(random.choice(model.tails))
        tokens = random.integers(0, model.spec.vocab_size, count, dtype=np.uint32)
        with self._lock:
            others = [each for each in self.chains if each.model is model and not each.is_damaged]
            kind = random.random()
            if others and kind < 0.45:
                base = others[random.integers(len(others))]
                if kind < 0.15 and len(base.tokens) < step * model.chunk_count_max:
                    tokens = np.concatenate([base.tokens, tokens[:step]])
                else:
                    shared = step * int(random.integers(0, len(base.tokens) // step + 1))
                    tokens = np.concatenate([base.tokens[:shared], tokens])[: max(shared + step, count)]
            chain = Chain(model, tokens)
            self.chains.append(chain)
        return chain

    def some(self, random: np.random.Generator, count: int) -> list[Chain]:
        """Promised chains, at random; damaged ones rather often."""
        with self._lock:
            known = [each for each in self.chains if each.promised]
            known += [each for each in known if each.is_damaged] * (len(known) // 4)
        return [known[random.integers(len(known))] for _ in range(count)] if known else []

    def promised_count(self) -> int:
        return sum(each.promised > 0 for each in self.chains)

    def damage(self, chain: Chain, token_start: int) -> None:
        """A test spoiled the chunk of this chain that starts there: whoever shares it may expect less."""
        stop = token_start + chain.model.spec.chunk_tokens
        for each in self.chains:
            if each.model is chain.model and np.array_equal(each.tokens[:stop], chain.tokens[:stop]):
                each.cap, each.is_damaged = min(each.cap, token_start), True
