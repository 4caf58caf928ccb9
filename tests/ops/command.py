"""The kvstore command, run in this process: half a second less than another one takes."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

from kvstore_ops import cli


@dataclass(frozen=True)
class Done:
    """What a command ended with and said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: str) -> Done:
    """``kvstore`` with these arguments, without a terminal."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        mock.patch.object(sys, "argv", ["kvstore", *arguments]),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
    ):  # fmt: skip
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    return Done(code or 0, out.getvalue(), err.getvalue())
