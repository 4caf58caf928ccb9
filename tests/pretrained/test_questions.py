"""Questions about real text: each has its answer in one document, once."""

from __future__ import annotations

from typing import Any

from kvstore_ops.pretrained.questions import questions


class Letters:
    """A tokenizer of characters, with a chat template."""

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(each) for each in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>"


def text(tokens: Any) -> str:
    return "".join(map(chr, tokens))


def test_each_prompt_has_its_answer_in_one_document() -> None:
    found = list(questions(Letters(), 6, [(8, 300), (3, 500)], seed=1))
    assert [[len(each) for each in question.documents] for question in found[:2]] == [[300] * 8, [500] * 3]
    assert len({question.preamble for question in found}) == 3
    for question in found:
        words, value = question.words
        assert text(question.answer) == f" {value}."
        start = text(question.suffix).rpartition("<assistant>")[2]
        holding = [each for each in question.documents if f"{start} {value}." in text(each)]
        assert len(holding) == 1
        assert words in text(question.suffix)
        assert [question.tokens[a:b] for a, b in question.segments] == [list(each) for each in question.documents]
        assert question.tokens[: len(question.preamble)] == list(question.preamble)


def test_one_seed_has_one_set_of_questions() -> None:
    one, two, three = (
        [question.tokens for question in questions(Letters(), 2, [(4, 300)], seed=seed)] for seed in (1, 1, 2)
    )
    assert one == two != three
