"""Prompts for the pretrained model: real text with facts in it, and questions about the facts.

Each document is a stretch of the Python language's documentation with one made-up fact on a line of its own. A prompt
has documents behind the start of the chat template, and asks for one fact. Facts are made up so that an answer can only
come from the prompt. They are of eight kinds, each at most once per prompt: over 1,000 and 2,000 tokens the model
answers 20 of 20 rightly after a full prefill; with facts of one kind (a code in every document) only half.
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
"""System messages of the preambles; empty: the chat template's own."""
FORM = " {}."
"""The form of an answer, around the fact's value."""
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
"""Kinds of fact: its beginning, its question, and a function that draws its value. The prompt ends with the fact's
beginning, so that the answer is its value."""


@dataclass(frozen=True, eq=False)
class Question:
    """A prompt: token ids of its ``preamble``, its ``documents`` and its ``suffix``, and of the right ``answer``.
    ``words``: question and answer as text."""

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
        """(start, stop) of each document in ``tokens``."""
        stops = [len(self.preamble)]
        for document in self.documents:
            stops.append(stops[-1] + len(document))
        return list(pairwise(stops))


def questions(
    tokenizer: Any,
    count: int,
    sizes: list[tuple[int, int]],
    seed: int,
    asked_count: int = 1,
    form: str = FORM,
) -> Iterator[Question]:
    """Yield the prompts of ``count`` contexts. ``sizes``: (documents, tokens per document) of the contexts, in turn; at
    most eight documents. ``asked_count``: number of consecutive prompts with the same documents, each about another.
    ``form``: of the right answer."""
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
        for asked in draw.sample(range(document_count), asked_count):
            begin, question, _ = kinds[asked]
            words, start = question.format(places[asked]), begin.format(places[asked])
            suffix = encode(f"\n\nQuestion: {words}{behind}{start}")
            answer = tuple(encode(form.format(values[asked])))
            yield Question(tuple(encode(before)), documents, tuple(suffix), answer, (words, values[asked]))


def _document(draw: random.Random, texts: list[list[int]], fact: list[int], length: int) -> tuple[int, ...]:
    """Return a stretch of real text, ``length`` tokens, with a fact somewhere inside."""
    text = draw.choice(texts)
    start = draw.randrange(len(text) - length + 1)
    body = text[start : start + length - len(fact)]
    place = draw.randrange(len(body) // 5, 4 * len(body) // 5)
    return (*body[:place], *fact, *body[place:])


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
