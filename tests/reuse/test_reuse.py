"""The benchmark reuse: a killed run goes on where it was, and half of the contexts judges what the others chose."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from kvstore_ops.bench import reuse, reuse_sibling
from kvstore_ops.profiling.answers import Agreement
from kvstore_ops.reuse import answers
from kvstore_ops.reuse.answers import Answers, Figures, Mean, answered, run_file
from kvstore_ops.reuse.settings import Asked, Asking, rounds_of
from kvstore_ops.reuse.subject import Caches, Subject
from kvstore_ops.reuse.table import Line, chosen, holds
from kvstore_ops.reuse.times import Turns
from kvstore_ops.reuse.times import run_file as times_file
from kvstore_ops.reuse.whole import Whole

from kvstore.errors import InvalidRequest
from kvstore.planning import Recompute

ROW = Asked("preamble", Recompute(0, -1, 0.2, "suffix_peak"))


@pytest.fixture(scope="module")
def subject() -> Subject:
    found = Subject("tiny")
    found.prompts = found.prompts[:3]
    return found


def rounds() -> list[list[Asked]]:
    (rows,) = rounds_of(Asking.OWN, "tiny", 6)
    return [[each] for each in rows]


def test_a_killed_run_goes_on_where_it_was(subject: Subject, tmp_path: Path, monkeypatch) -> None:
    path, every = tmp_path / "answers.jsonl", rounds()
    whole = answered(subject, every, Caches(subject, []))
    asked: list[int] = []
    ask = answers.ask

    def until_killed(*given) -> tuple[bool, list[Agreement]]:
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.append(subject.prompts.index(given[2]))
        return ask(*given)

    monkeypatch.setattr(answers, "ask", until_killed)
    with pytest.raises(KeyboardInterrupt), run_file(path, subject, every) as file:
        answered(subject, every, Caches(subject, []), file)
    path.write_bytes(path.read_bytes() + b'{"round": 1, "prom')  # cut off by the kill
    asked.clear()
    with run_file(path, subject, every) as file:
        found = answered(subject, every, Caches(subject, []), file)
    assert asked == [1, 2]  # the second round's first was kept: all are asked once
    assert found == whole


def test_another_run_and_a_line_of_something_else_are_refused(subject: Subject, tmp_path: Path) -> None:
    path, every = tmp_path / "answers.jsonl", rounds()
    with run_file(path, subject, every) as file:
        file.add({"round": 7, "prompt": 0, "is_right": True, "rows": []})
    with run_file(path, subject, every) as file, pytest.raises(InvalidRequest, match=r"line 2: not an answer"):
        answered(subject, every, Caches(subject, []), file)
    with pytest.raises(InvalidRequest, match="its rounds differ"), run_file(path, subject, every[:1]):
        pass
    with run_file(path, subject, every[:1], fresh=True) as file:
        assert file.found == []


def test_rows_are_judged_on_the_contexts_that_did_not_choose() -> None:
    kept, lost = Agreement(True, 1.0, 0.01, 0.2), Agreement(False, 0.5, 1.0, 0.2)
    found = Answers({index: index != 3 for index in range(8)}, {ROW: dict.fromkeys((0, 1, 4, 5), kept)})
    found.kept[ROW] |= {2: lost, 3: lost, 6: kept}  # the last prompt was not asked yet, and number 3 is wrong in full
    assert found.judged(ROW, (0,), 2) == Figures(4, Mean(1.0, 0.0), Mean(1.0, 0.0), Mean(0.01, 0.0))
    other = found.judged(ROW, (1,), 2)
    assert (other.kept.value, other.answers) == (0.5, 2)
    assert other.tokens.value == pytest.approx(2 / 3)
    found.kept[Asked("alone", Recompute.reuse())] = {0: kept}
    assert found.whole_rows() == []  # neither was asked about all eight
    found.kept[ROW][7] = kept
    assert found.whole_rows() == [ROW]
    line = Line(ROW, 0.2, {9: [3.0]}, found.judged(ROW, (0,), 2), other)
    slower = replace(line, by_tokens={9: [2.0]})
    better = replace(line, by_tokens={9: [9.0]}, chosen_by=other)
    assert chosen([slower, line, better]) is line  # the fastest of those that keep enough where they are chosen
    assert chosen([better]) is None


def test_a_row_is_chosen_with_two_standard_errors_to_spare() -> None:
    sure = Figures(100, Mean(0.95, 0.02), Mean(0.98, 0.004), Mean(0.05, 0.01))
    assert chosen([Line(ROW, 0.2, {9: [3.0]}, sure, sure)])
    for unsure in (
        replace(sure, kept=Mean(0.93, 0.02)),
        replace(sure, tokens=Mean(0.98, 0.006)),
        replace(sure, kl=Mean(0.07, 0.01)),
    ):
        line = Line(ROW, 0.2, {9: [3.0]}, unsure, unsure)
        assert holds(line.judged)  # which is all that is asked for where it is judged
        assert chosen([line]) is None


def test_prompts_of_one_context_are_no_more_than_one_witness() -> None:
    apart = Mean.of([[1.0], [0.0], [1.0], [0.0]], 0.0)
    alike = Mean.of([[1.0] * 8, [0.0] * 8, [1.0] * 8, [0.0] * 8], 0.0)
    assert alike == apart
    assert apart.error == pytest.approx(statistics.stdev([1, 0, 1, 0]) / 2)
    assert Mean.of([[1.0] * 8, []], 0.0) == Mean(1.0, math.inf)  # one context alone does not tell how far they differ
    assert Mean.of([], 0.5) == Mean(0.5, 0.0)


def test_one_context_is_judged_but_chooses_nothing() -> None:
    alone = Figures(8, *[Mean.of([[value]], 0.0) for value in (1.0, 1.0, 0.01)])
    assert holds(alone)
    assert not holds(alone, 2)


def test_prompts_that_are_asked_anew_judge_the_row_that_was_chosen_before(tmp_path: Path) -> None:
    whole = Whole(Asking.ANEW, "tiny", path=tmp_path / "answers")
    (rows,) = rounds_of(Asking.ANEW, "tiny", 6)
    found = whole.table()
    assert found.name == "reuse-anew"
    assert len(found.conditions["rows"]) == len(rows) == 3
    first = found.conditions["rows"][0]
    assert found.value == first["f"]  # whether it is the fastest or not
    assert "chosen_by" not in first  # none of these prompts chose
    right = round(found.conditions["right_in_full"] * found.conditions["prompts"])
    assert first["answers"] == right > 0  # and all judge


@pytest.mark.parametrize("bench", [reuse, reuse_sibling])
def test_without_the_pretrained_model_the_testbeds_answer(bench) -> None:
    found = bench.run("tiny")
    assert found.conditions["why_not_pretrained"]
    assert len({row["answers"] for row in found.conditions["rows"]}) == 1
    assert found.conditions["rows"][0]["kept"] < max(row["kept"] for row in found.conditions["rows"])


def test_turns_that_are_in_the_file_count(subject: Subject, tmp_path: Path) -> None:
    rows = [ROW, Asked("alone", Recompute.reuse())]
    with times_file(tmp_path / "times.jsonl", subject, rows) as file:
        file.add({"tokens": 900, "seconds": [4.0, 6.0, 2.0, 1.0]})
        file.add({"tokens": 1800, "seconds": [6.0, 6.0, 2.0, 3.0]})
    with times_file(tmp_path / "times.jsonl", subject, rows) as file:
        turns = Turns(rows, file)
        assert len(turns) == 2
        faster = turns.ratios()  # than the full prefill before and the one behind
        assert faster == {rows[0]: {900: [2.5], 1800: [3.0]}, rows[1]: {900: [5.0], 1800: [2.0]}}
        assert Line(ROW, 0.2, faster[ROW], *[Figures(0, *[Mean(0.0, 0.0)] * 3)] * 2).faster == 2.75
        file.add({"tokens": 900, "seconds": [6.0, 6.0, 2.0]})
    with (
        times_file(tmp_path / "times.jsonl", subject, rows) as file,
        pytest.raises(InvalidRequest, match="line 4: not a"),
    ):
        Turns(rows, file)


def test_turns_of_other_rows_have_a_file_of_their_own(subject: Subject, tmp_path: Path) -> None:
    """Else times of the first round would be in the way of those of all rows."""
    rows = [ROW, Asked("alone", Recompute.reuse())]
    with times_file(tmp_path / "a.1", subject, rows[:1]) as file:
        file.add({"tokens": 900, "seconds": [4.0, 6.0, 2.0]})
    for answers_path, asked in ((tmp_path / "a.1", rows), (tmp_path / "a.2", rows[:1])):
        with times_file(answers_path, subject, asked) as file:
            assert file.found == []
    with times_file(tmp_path / "a.1", subject, rows[:1]) as file:
        assert len(file.found) == 1


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    "content", [b'{"mine": 1', b'{"mine": 1}\n{"finished": true}\n', b"a text\nof mine", b"\n", b"[1]\n"]
)
def test_a_file_of_something_else_stays_as_it_is(subject: Subject, tmp_path: Path, content: bytes, fresh: bool) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match="it stays as it is"):
        run_file(path, subject, rounds(), fresh=fresh)
    assert path.read_bytes() == content


def test_a_run_that_was_killed_in_its_first_line_begins_anew(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    run_file(path, subject, rounds()).close()
    first = path.read_bytes()
    for length in (0, 1, len(first) // 2, len(first) - 1):
        path.write_bytes(first[:length])
        run_file(path, subject, rounds()).close()
        assert path.read_bytes()[:20] == first[:20]
        assert path.read_bytes().endswith(b"\n")


def test_a_table_of_no_answers_says_so(subject: Subject, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("kvstore_ops.reuse.whole.Subject", lambda *_, **__: subject)
    monkeypatch.setattr(subject, "scale", "full")
    monkeypatch.setattr("kvstore_ops.reuse.whole.rounds_of", lambda *_, **__: rounds())
    with pytest.raises(InvalidRequest, match="without --times first"):
        Whole(Asking.OWN, "full", path=tmp_path / "answers").table(asks=False)
