"""Real text: the Python language's own documentation topics, and a tokenizer trained on them."""

from __future__ import annotations

from pydoc_data import topics
from typing import Any

VOCABULARY = 8192
QUESTION = "Given all of the above: how does a class statement find its metaclass, and what does it call? "


def documents() -> list[str]:
    """Return the topics, ordered by name; about 465 kB of prose."""
    return [f"Topic {name}\n\n{text}\n" for name, text in sorted(topics.topics.items())]


def prompt_tokens(context_count: int, question_count: int, offset: int = 0) -> list[int]:
    """Return ``context_count`` tokens of documents and then ``question_count`` of a question. ``offset``: begin at
    another document, for text that shares no prefix."""
    tokenizer = _tokenizer()
    pages = documents()
    context = tokenizer.encode("".join(pages[offset:] + pages[:offset])).ids[:context_count]
    question = tokenizer.encode(QUESTION * question_count).ids[:question_count]
    return [*context, *question]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    tokenizer.train_from_iterator(documents(), trainer)
    return tokenizer
