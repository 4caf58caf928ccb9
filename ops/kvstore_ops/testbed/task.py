"""The testbed's task: variable binding across chunks, with an answer to every reference.

A context is a run of chunks of 32 tokens: a document mark, 5 statements `SET variable rhs`, and random filler
between them. An rhs is one of 32 values or a variable set earlier, so that an answer may take up to 3 hops
through other chunks. The suffix asks: `ASK variable`, 8 times. The label of every rhs and of every asked variable
is the value at the end of its chain (which pushes the resolution into the context's KV, as real models do), and
"unknown" where the chain leaves the window, so that a chunk alone is in distribution.

Labels stand at the token they answer, not one further: a model's logits at that token are its answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.errors import InvalidRequest

VALUES = 32
VARIABLES = 64
FILLERS = 64
FIRST_VALUE = 0
FIRST_VARIABLE = FIRST_VALUE + VALUES
FIRST_FILLER = FIRST_VARIABLE + VARIABLES
MARK = FIRST_FILLER + FILLERS
SET = MARK + 1
ASK = MARK + 2
UNKNOWN = MARK + 3
VOCABULARY = MARK + 4

CHUNK_TOKENS = 32
STATEMENTS = 5
NO_LABEL = -100

Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The difficulty of a context: the number of chunks, the share of statements whose rhs is a variable, the most
    hops, and the number of questions."""

    chunks: int = 6
    references: float = 0.6
    hops: int = 3
    questions: int = 8

    def __post_init__(self) -> None:
        most = VARIABLES // STATEMENTS
        if not 1 <= self.chunks <= most:
            raise InvalidRequest(
                f"chunks is {self.chunks}: from 1 to {most}, as every statement sets a variable of its own"
            )
        if not 0 <= self.references <= 1:
            raise InvalidRequest(f"references is {self.references}: a share in [0, 1]")
        if self.hops < 0 or self.questions < 1:
            raise InvalidRequest(f"hops {self.hops} and questions {self.questions}: at least 0 and 1")


@dataclass(frozen=True, eq=False)
class Contexts:
    """A batch of contexts with their questions.

    Shapes: tokens and labels `[contexts, context_tokens + suffix_tokens]`; a token without an answer has the label
    `NO_LABEL`. crosses, of the same shape: True where the chain of a labelled token passes through another chunk than
    the chunk it starts in. boundaries `[chunks + 1]`: chunk i is tokens[:, boundaries[i]:boundaries[i + 1]].
    """

    tokens: Array
    labels: Array
    crosses: np.ndarray[Any, np.dtype[np.bool_]]
    boundaries: tuple[int, ...]

    @property
    def context_tokens(self) -> int:
        return self.boundaries[-1]

    @property
    def context(self) -> Array:
        """The chunks' tokens, `[contexts, context_tokens]`."""
        return self.tokens[:, : self.context_tokens]

    @property
    def suffix(self) -> Array:
        """The questions' tokens, `[contexts, suffix_tokens]`."""
        return self.tokens[:, self.context_tokens :]

    @property
    def answers(self) -> Array:
        """The label of each question, `[contexts, questions]`."""
        return self.labels[:, self.context_tokens + 1 :: 2]


def generate(
    random: np.random.Generator, count: int, shape: Shape, *, dropped: int = 0, crossing_only: bool = False
) -> Contexts:
    """Return `count` contexts of one shape, without their first `dropped` chunks, whose variables are then unknown.

    crossing_only: ask only for variables whose chain passes through another chunk, where a context has such variables.
    """
    if not 0 <= dropped < shape.chunks:
        raise InvalidRequest(f"dropped is {dropped}: from 0 to chunks - 1 = {shape.chunks - 1}")
    rows = [_context(random, shape, dropped, crossing_only) for _ in range(count)]
    tokens, labels, crosses = (np.stack(part) for part in zip(*rows, strict=True))
    boundaries = tuple(CHUNK_TOKENS * i for i in range(shape.chunks - dropped + 1))
    return Contexts(tokens, labels, crosses, boundaries)


def _context(
    random: np.random.Generator, shape: Shape, dropped: int, crossing_only: bool
) -> tuple[Array, Array, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Return one context's tokens, labels and crossings."""
    statements = shape.chunks * STATEMENTS
    variables = random.permutation(VARIABLES)[:statements]
    literals = random.integers(0, VALUES, statements)
    refers = random.random(statements) < shape.references
    targets = random.random(statements)
    hops = [0] * statements
    label = [0] * statements
    crossing = [False] * statements
    rhs = [0] * statements
    for i in range(statements):
        chunk = i // STATEMENTS
        earlier = [j for j in range(i) if hops[j] < shape.hops] if refers[i] else []
        if earlier:
            j = earlier[int(targets[i] * len(earlier))]
            hops[i] = hops[j] + 1
            rhs[i] = FIRST_VARIABLE + int(variables[j])
            label[i] = label[j] if j // STATEMENTS >= dropped else UNKNOWN
            crossing[i] = crossing[j] or j // STATEMENTS != chunk
        else:
            rhs[i] = label[i] = FIRST_VALUE + int(literals[i])

    kept = shape.chunks - dropped
    tokens = np.empty(kept * CHUNK_TOKENS + 2 * shape.questions, np.int64)
    labels = np.full(tokens.shape, NO_LABEL, np.int64)
    crosses = np.zeros(tokens.shape, np.bool_)
    context_tokens = kept * CHUNK_TOKENS
    tokens[:context_tokens] = FIRST_FILLER + random.integers(0, FILLERS, context_tokens)
    tokens[:context_tokens:CHUNK_TOKENS] = MARK
    for chunk in range(dropped, shape.chunks):
        places = _places(random) + (chunk - dropped) * CHUNK_TOKENS
        for place, i in zip(places, range(chunk * STATEMENTS, (chunk + 1) * STATEMENTS), strict=True):
            tokens[place : place + 3] = SET, FIRST_VARIABLE + variables[i], rhs[i]
            labels[place + 2] = label[i]
            crosses[place + 2] = crossing[i]

    visible = np.arange(dropped * STATEMENTS, statements)
    if crossing_only:
        across = visible[[crossing[i] for i in visible]]
        visible = across if across.size else visible
    asked = random.permutation(visible)[: shape.questions]
    if asked.size < shape.questions:
        asked = np.concatenate([asked, random.choice(visible, shape.questions - asked.size)])
    tokens[context_tokens::2] = ASK
    tokens[context_tokens + 1 :: 2] = FIRST_VARIABLE + variables[asked]
    labels[context_tokens + 1 :: 2] = [label[i] for i in asked]
    crosses[context_tokens + 1 :: 2] = [crossing[i] for i in asked]
    return tokens, labels, crosses


def _places(random: np.random.Generator) -> Array:
    """Draw the places at which a chunk's statements start: in order, without overlap, after the mark."""
    fillers = CHUNK_TOKENS - 1 - 3 * STATEMENTS
    gaps = np.sort(random.integers(0, fillers + 1, STATEMENTS))
    return 1 + gaps + 3 * np.arange(STATEMENTS)
