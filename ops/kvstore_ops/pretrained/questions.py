"""Real text with facts in it, and questions about them: what the pretrained model is asked.

Each document is a stretch of the Python language's documentation into which one made-up fact was put, in a line of its
own; a prompt has documents behind the chat template's beginning and asks for one fact. Facts are made up so that no
answer can be known but from the prompt, and are of eight kinds, each once per prompt: over 1,000 and 2,000 tokens the
model answers 20 of 20 rightly after a full prefill, of like facts (a code in every document) only half.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pydoc_data import topics
from typing import Any

from kvstore_client.engines.transformers_documents import chat_frame

SYSTEMS = (
    "",
    "You answer questions about documents, in few words.",
    "You are a careful assistant. Take every answer from the documents that you are given.",
)
"""Of the preambles; empty: what the chat template says itself."""
INSTRUCTION = "Read these documents and answer the question.\n\n"
PLACES = (
    "harbour", "bakery", "library", "stadium", "museum", "castle", "airport", "hospital", "theatre", "garden",
    "factory", "school", "bridge", "temple", "market", "prison",
)  # fmt: skip
FIRST = (
    "Alice", "Bob", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Isabel", "Jack", "Karen", "Leo", "Maria",
    "Nathan", "Olivia", "Peter", "Rachel", "Simon", "Tom", "Victor",
)  # fmt: skip
LAST = (
    "Baker", "Carter", "Dawson", "Ellis", "Foster", "Gibson", "Harris", "Ingram", "Jenkins", "Keller", "Lawson",
    "Morris", "Norton", "Parker", "Quinn", "Ramsey",
)  # fmt: skip
CITIES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Dublin", "Vienna", "Prague", "Madrid", "Athens", "Tokyo", "Nairobi", "Boston",
    "Geneva", "Helsinki",
)  # fmt: skip
COLOURS = ("red", "green", "blue", "yellow", "white", "black", "purple", "orange", "brown", "pink")
ANIMALS = ("lion", "horse", "eagle", "dolphin", "tiger", "rabbit", "wolf", "bear", "fox", "owl")

Drawn = Callable[[random.Random], str]


def _person(draw: random.Random) -> str:
    return f"{draw.choice(FIRST)} {draw.choice(LAST)}"


KINDS: tuple[tuple[str, str, Drawn], ...] = (
    ("The secret code of the {} is", "What is the secret code of the {}?", lambda d: str(d.randrange(1000, 10000))),
    ("The director of the {} is", "Who is the director of the {}?", _person),
    ("The {} was founded in the year", "When was the {} founded?", lambda d: str(d.randrange(1700, 2000))),
    ("The walls of the {} are painted", "What colours are the walls of the {} painted?",
     lambda d: " and ".join(d.sample(COLOURS, 2))),
    ("A ticket for the {} costs", "How much does a ticket for the {} cost?",
     lambda d: f"{d.randrange(12, 99)} dollars"),
    ("On the sign of the {} there is a", "What is there on the sign of the {}?",
     lambda d: " and a ".join(d.sample(ANIMALS, 2))),
    ("The new {} will be built in the city of", "In which city will the new {} be built?", lambda d: d.choice(CITIES)),
    ("The song about the {} was written by", "Who wrote the song about the {}?", _person),
)  # fmt: skip
"""How a fact begins, how it is asked for, and what it may say. The answer is asked for with the fact's beginning."""


@dataclass(frozen=True, eq=False)
class Question:
    """A prompt: token ids of its ``preamble``, its ``documents`` and its ``suffix``; the ``answer`` that is right, as
    tokens. ``words``: question and answer to be read."""

    preamble: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    suffix: tuple[int, ...]
    answer: tuple[int, ...]
    words: tuple[str, str] = ("", "")

    @property
    def tokens(self) -> list[int]:
        return [*self.preamble, *(token for each in self.documents for token in each), *self.suffix]

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Where the documents stand."""
        stops = [len(self.preamble)]
        for document in self.documents:
            stops.append(stops[-1] + len(document))
        return list(pairwise(stops))


def questions(tokenizer: Any, count: int, sizes: list[tuple[int, int]], seed: int) -> Iterator[Question]:
    """``count`` prompts; ``sizes``: how many documents of how many tokens each prompt has, in turn, eight at most."""
    draw = random.Random(seed)  # noqa: S311 - the same questions each time
    encode = _encoder(tokenizer)
    texts = [found for _, page in sorted(topics.topics.items()) if len(found := encode(page)) > 600]
    frames = [chat_frame(tokenizer, system, INSTRUCTION) for system in SYSTEMS]
    for index in range(count):
        before, behind = frames[index % len(frames)]
        document_count, length = sizes[index % len(sizes)]
        kinds, places = draw.sample(KINDS, document_count), draw.sample(PLACES, document_count)
        values = [value(draw) for _, _, value in kinds]
        facts = [
            f"{begin.format(place)} {value}." for (begin, _, _), place, value in zip(kinds, places, values, strict=True)
        ]
        documents = tuple(_document(draw, texts, encode(f"\n\n{fact}\n\n"), length) for fact in facts)
        asked = draw.randrange(document_count)
        begin, question, _ = kinds[asked]
        words, start = question.format(places[asked]), begin.format(places[asked])
        suffix = encode(f"\n\nQuestion: {words}{behind}{start}")
        answer = tuple(encode(f" {values[asked]}."))
        yield Question(tuple(encode(before)), documents, tuple(suffix), answer, (words, values[asked]))


def _document(draw: random.Random, texts: list[list[int]], fact: list[int], length: int) -> tuple[int, ...]:
    """A stretch of real text with a fact somewhere inside."""
    text = draw.choice(texts)
    start = draw.randrange(len(text) - length + 1)
    body = text[start : start + length - len(fact)]
    place = draw.randrange(len(body) // 5, 4 * len(body) // 5)
    return (*body[:place], *fact, *body[place:])


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
