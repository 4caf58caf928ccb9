"""Wrong and extreme arguments of the kvstore command: each is refused by one line that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvstore_ops.locate import read_tokens
from kvstore_ops.operators.words import selection_of
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from tests.ops.command import run


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--older-than", ("evict", "--model", "chat", "--older-than", "", "--yes")),
        ("--tenant", ("evict", "--all", "--tenant", "", "--yes")),
        ("--tenant", ("evict", "--all", "--tenant=", "--yes")),
        ("--tier", ("drain", "--tier", "", "--yes")),
        ("--tenant", ("scan", "--delete", "--tenant", "", "--older-than", "0 s", "--yes")),
        ("--model", ("verify", "--model", "")),
        ("--address", ("ls", "--address", "")),
        ("--state-directory", ("serve", "--state-directory", "")),
    ],
)
def test_an_option_without_a_value_never_means_all(option: str, arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"kvstore: {option} is empty: give it a value, or leave it out\n"


@pytest.mark.parametrize("arguments", [("ls", "--model=bWQ1="), ("locate", "--", "")])
def test_a_value_that_ends_with_an_equals_sign_is_one(arguments: tuple[str, ...]) -> None:
    assert "is empty" not in run(*arguments).err


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("--larger-than: '99999999999999 TiB' is too large for a size", ("ls", "--larger-than", "99999999999999 TiB")),
        (f"--for: '{'9' * 20} d' is too large for a duration", ("pin", "--model", "m", "--for", f"{'9' * 20} d")),
        ("--used-at-most 4294967296: use 0 to 4294967295", ("ls", "--used-at-most", "4294967296")),
        ("--interval nan: use 0.2 to 86400", ("top", "--interval", "nan")),
        ("--interval inf: use 0.2 to 86400", ("top", "--interval", "inf")),
        ("'--count'", ("top", "--count", "-1")),
        ("'--count'", ("watch", "--count", "-1")),
    ],
)
def test_a_number_that_is_too_large_or_none_is_refused(
    sidecar: Sidecar, named: str, arguments: tuple[str, ...]
) -> None:
    done = run(*arguments, "--socket", sidecar.address.removeprefix("unix://"))
    assert (done.code, done.out) == (2, "")
    assert named in done.err
    assert "Traceback" not in done.err


def test_a_prompt_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompt.json"
    file.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(InvalidRequest, match=f"^--prompt {file} is no JSON list of token ids"):
        read_tokens(file, "")
    file.write_text(json.dumps([1, 2]), encoding="utf-8")
    assert read_tokens(file, "") == [[1, 2]]


def test_an_age_below_a_second_is_never_rounded_to_all() -> None:
    ages = {"0 s": 0, "900 ms": 1, "1.5 s": 2, "2 s": 2}
    assert {text: selection_of(older_than=text).older_than_seconds for text in ages} == ages


def test_yes_without_delete_is_no_scan() -> None:
    done = run("scan", "--older-than", "1 d", "--yes")
    assert (done.code, done.err) == (2, "kvstore: --yes goes with --delete: what is to be deleted?\n")
