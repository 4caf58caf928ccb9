"""The task: labels against a resolver that reads only the tokens, and the shape of contexts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_ops.testbed import task

from kvstore.errors import InvalidRequest

SHAPES = st.builds(
    task.Shape,
    chunks=st.integers(1, 7),
    references=st.floats(0, 1),
    hops=st.integers(0, 4),
    questions=st.integers(1, 12),
)


def read(tokens: list[int]) -> dict[int, tuple[int, int]]:
    """variable -> (rhs, place of the rhs) of every statement in the text."""
    found: dict[int, tuple[int, int]] = {}
    for place, token in enumerate(tokens):
        if token == task.SET:
            assert tokens[place + 1] not in found
            found[tokens[place + 1]] = (tokens[place + 2], place + 2)
    return found


def resolve(said: dict[int, tuple[int, int]], token: int) -> tuple[int, list[int]]:
    """The value at the end of a chain, and the chunks its statements stand in."""
    chunks = []
    while task.FIRST_VARIABLE <= token < task.FIRST_FILLER:
        if token not in said:
            return task.UNKNOWN, chunks
        token, place = said[token]
        chunks.append(place // task.CHUNK_TOKENS)
    return token, chunks


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32), data=st.data())
def test_every_label_is_what_the_text_says(shape: task.Shape, seed: int, data: st.DataObject) -> None:
    dropped = data.draw(st.integers(0, shape.chunks - 1))
    found = task.generate(np.random.default_rng(seed), 2, shape, dropped=dropped)
    assert found.context_tokens == (shape.chunks - dropped) * task.CHUNK_TOKENS
    for tokens, labels, crosses in zip(found.tokens.tolist(), found.labels, found.crosses, strict=True):
        said = read(tokens[: found.context_tokens])
        assert len(said) == (shape.chunks - dropped) * task.STATEMENTS
        wanted = {place: rhs for rhs, place in said.values()}
        wanted |= {place: tokens[place] for place in range(found.context_tokens + 1, len(tokens), 2)}
        assert sorted(wanted) == np.flatnonzero(labels != task.NO_LABEL).tolist()
        for place, token in wanted.items():
            value, chunks = resolve(said, token)
            assert labels[place] == value
            if value != task.UNKNOWN:
                home = chunks[:1] if place >= found.context_tokens else [place // task.CHUNK_TOKENS]
                assert crosses[place] == (len({*home, *chunks}) > 1)
                assert len(chunks) <= shape.hops + 1


def test_a_context_is_chunks_of_a_mark_five_statements_and_filler_then_the_questions() -> None:
    found = task.generate(np.random.default_rng(5), 20, task.Shape())
    assert found.tokens.shape == (20, 6 * 32 + 16)
    assert found.boundaries == (0, 32, 64, 96, 128, 160, 192)
    for first, last in zip(found.boundaries, found.boundaries[1:], strict=False):
        chunk = found.tokens[:, first:last]
        assert (chunk[:, 0] == task.MARK).all()
        assert ((chunk == task.SET).sum(axis=1) == 5).all()
        fillers = (chunk >= task.FIRST_FILLER) & (chunk < task.FIRST_FILLER + task.FILLERS)
        assert (fillers.sum(axis=1) == 16).all()
    assert (found.suffix[:, ::2] == task.ASK).all()
    assert found.answers.shape == (20, 8)
    assert (found.answers < task.VALUES).all(), "with all chunks there, nothing is unknown"


def test_a_chunk_alone_is_what_training_shows_when_all_earlier_chunks_are_dropped() -> None:
    shape = task.Shape()
    whole = task.generate(np.random.default_rng(9), 4, shape)
    alone = task.generate(np.random.default_rng(9), 4, shape, dropped=shape.chunks - 1)
    last_chunk = whole.tokens[:, 160:192]
    said, said_whole = read(alone.context[0].tolist()), read(last_chunk[0].tolist())
    assert {v: rhs for v, (rhs, _) in said.items()} == {v: rhs for v, (rhs, _) in said_whole.items()}
    assert (alone.labels == task.UNKNOWN).any()
    assert (last_chunk[:, 0] == alone.context[:, 0]).all()


def test_questions_that_cross_chunks_are_asked_alone_when_wanted() -> None:
    found = task.generate(np.random.default_rng(3), 50, task.Shape(), crossing_only=True)
    assert found.crosses[:, found.context_tokens + 1 :: 2].all()
    mixed = task.generate(np.random.default_rng(3), 50, task.Shape())
    assert 0.1 < mixed.crosses[:, mixed.context_tokens + 1 :: 2].mean() < 0.9


def test_the_same_seed_draws_the_same_contexts() -> None:
    one, same, other = (task.generate(np.random.default_rng(seed), 3, task.Shape()) for seed in (1, 1, 2))
    assert (one.tokens == same.tokens).all()
    assert (one.labels == same.labels).all()
    assert (one.tokens != other.tokens).any()


@pytest.mark.parametrize("wrong", [{"chunks": 0}, {"chunks": 13}, {"references": 1.5}, {"hops": -1}, {"questions": 0}])
def test_a_shape_that_cannot_be_is_refused_by_name(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        task.Shape(**wrong)


def test_dropping_every_chunk_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="dropped is 6"):
        task.generate(np.random.default_rng(0), 1, task.Shape(), dropped=6)
