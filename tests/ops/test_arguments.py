"""Wrong and extreme arguments of the kvstore command: each is refused by one line that names it."""

from __future__ import annotations

import pytest

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
