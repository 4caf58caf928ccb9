"""The repository's own checks catch what they are for."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2
from kvstore_ops import contract, lint

BAD = {
    "time": "kvstore/server/x.py|import time\n",
    "random": "clients/kvstore_client/x.py|from random import choice\n",
    "os.urandom": "kvstore/keys.py|import os\nos.urandom(3)\n",
    "threading.Thread": "kvstore/server/x.py|import threading\nthreading.Thread()\n",
    "create_task": "kvstore/server/x.py|import asyncio\nasyncio.create_task(f())\n",
    "pickle": "ops/x.py|import pickle\n",
    "torch.load": "tests/x.py|import torch\ntorch.load('x')\n",
    "allow_pickle": "ops/x.py|import numpy as np\nnp.load('x', allow_pickle=True)\n",
    "eval": "kvstore/x.py|eval('1')\n",
    "one way": "kvstore/catalog/x.py|from kvstore.controller import Controller\n",
    "server's rooms": "clients/kvstore_client/x.py|import kvstore.controller\n",
    "a room is missing": "kvstore/x.py|" + "x = 1\n" * 401,
    "at most 60": "kvstore/x.py|def f():\n" + "    x = 1\n" * 61,
}


@pytest.mark.parametrize("rule", BAD)
def test_each_rule_catches_a_bad_example(rule: str) -> None:
    path, text = BAD[rule].split("|", 1)
    assert any(rule in str(finding) for finding in lint.check_source(path, text))


def test_what_is_allowed_is_not_found() -> None:
    assert lint.check_source("kvstore/seams/clock.py", "import time\ntime.sleep(1)\n") == []
    assert lint.check_source("kvstore/server/x.py", "from kvstore.controller import Controller\n") == []
    assert lint.check_source("ops/x.py", "import time\n") == []
    assert lint.check_source("kvstore/server/x.py", "import time  # seam: a reason\n") == []
    assert lint.check_tree() == []


def contract_set(**changes: object) -> descriptor_pb2.FileDescriptorSet:
    files = contract._descriptors()
    message = next(each for file in files.file for each in file.message_type if each.name == "LookupRequest")
    field = message.field[0]
    for name, value in changes.items():
        if name == "removed":
            del message.field[0]
        elif name == "reserved":
            del message.field[0]
            message.reserved_range.add(start=1, end=2)
            message.reserved_name.append("query")
        else:
            setattr(field, name, value)
    return files


def test_breaking_changes_are_found() -> None:
    before = contract_set()
    assert contract.breaking(before, before) == []
    for change in ({"removed": True}, {"number": 9}, {"name": "question"}, {"type": 9}):
        assert contract.breaking(before, contract_set(**change)), change
    assert contract.breaking(before, contract_set(reserved=True)) == []


def test_naming_rules_are_found() -> None:
    assert contract.lint(contract_set()) == []
    assert "snake_case" in contract.lint(contract_set(name="Query"))[0]


def test_the_committed_contract_is_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert contract.check() == 0, capsys.readouterr().out
