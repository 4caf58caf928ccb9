"""The repository's own checks catch what they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from kvstore_ops import contract, lint, rooms

BAD = {
    "time": "kvstore/server/x.py|import time\n",
    "random": "clients/kvstore_client/x.py|from random import choice\n",
    "os.urandom": "kvstore/keys.py|import os\nos.urandom(3)\n",
    "threading.Thread": "kvstore/server/x.py|import threading\nthreading.Thread()\n",
    "create_task": "kvstore/server/x.py|import asyncio\nasyncio.create_task(f())\n",
    "imports threading.Thread": "kvstore/server/x.py|from threading import Thread\n",
    "imports os.urandom": "kvstore/keys.py|from os import urandom\n",
    "imports torch.load": "ops/x.py|from torch import load\n",
    "imports kvstore.controller": "kvstore/catalog/x.py|from kvstore import controller\n",
    "client imports": "clients/kvstore_client/x.py|from kvstore import controller\n",
    "in full": "kvstore/catalog/x.py|from ..controller import Controller\n",
    "give both a layer": "kvstore/catalog/x.py|import kvstore.attic\n",
    "pickle": "ops/x.py|import pickle\n",
    "torch.load": "tests/x.py|import torch\ntorch.load('x')\n",
    "allow_pickle": "ops/x.py|import numpy as np\nnp.load('x', allow_pickle=True)\n",
    "eval": "kvstore/x.py|eval('1')\n",
    "one way": "kvstore/catalog/x.py|from kvstore.controller import Controller\n",
    "server's rooms": "clients/kvstore_client/x.py|import kvstore.controller\n",
    "knows nothing of it": "kernels/kvstore_copies/x.py|from kvstore import spec\n",
    "an installed kvstore": "kernels/kvstore_kernels/x.py|from tests import simulated\n",
    "has no tests": "kvstore/__init__.py|def f():\n    from tests.simulated.disk import SimulatedDisk\n",
    "imports tests.simulated": "ops/x.py|import tests.simulated as twins\n",
    "compares digest by ==": "kvstore/remote/x.py|if digest == given: pass\n",
    "through the controller": "kvstore/server/x.py|n = self._controller.parts.arena.regions\n",
    "controller.tickets.release reaches": "kvstore/server/x.py|controller.tickets.release(ticket)\n",
    "compares secret by ==": "kvstore/server/x.py|x = session.secret != other\n",
    "names the NVMe tier": "kvstore/catalog/x.py|def f(tier: NvmeTier) -> None: ...\n",
    "server/tiers.py builds it": "kvstore/server/x.py|from kvstore.tiers.nvme.regions import Regions\n",
    "ask what the contract has": "kvstore/movement/x.py|from kvstore.tiers import nvme\n",
    "takes a residency apart": "kvstore/catalog/x.py|x = table.residencies[row] >> 56\n",
    "only its tier knows": "kvstore/movement/x.py|np.frombuffer(self._residencies, np.int64)[rows] & 0xFF\n",
    "what the number means": "kvstore/server/x.py|residency &= mask\n",
    "a room is missing": "kvstore/x.py|" + "x = 1\n" * 401,
    "401 lines": "tests/x.py|" + "x = 1\n" * 401,
    "imports torch: planning is pure": "kvstore/planning/x.py|if TYPE_CHECKING:\n    import torch\n",
    "imports grpc: planning is pure": "kvstore/planning/x.py|import grpc\n",
    "imports numpy: planning is pure": "kvstore/planning/x.py|from numpy import load\n",
    "imports os: planning is pure": "kvstore/planning/x.py|import os\n",
    "imports kvstore.seams: planning is pure": "kvstore/planning/x.py|from kvstore import seams\n",
    "imports kvstore.seams.clock: planning is pure": "kvstore/planning/x.py|from kvstore.seams.clock import Clock\n",
    "calls open: planning is pure": "kvstore/planning/x.py|open('profile')\n",
    "is a MappedSession": "clients/kvstore_client/x.py|"
    "from kvstore_client.planes.shared_memory.session import MappedSession\nisinstance(x, MappedSession | None)\n",
    "a plane answers": "clients/kvstore_client/x.py|from kvstore_client import planes\nisinstance(x, planes.Session)\n",
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
    assert lint.check_source("tests/x.py", "import random\nfrom tests.simulated import ManualClock\n") == []
    assert (
        lint.check_source(
            "kvstore/server/x.py", "tenant.controller.stats().counters.items, settings.controller.deadline_s\n"
        )
        == []
    )
    assert lint.check_source("kvstore/remote/x.py", "parent == ROOT_DIGEST or spec == other\n") == []
    assert lint.check_source("kvstore/catalog/x.py", "digest == other\n") == []
    assert lint.check_source("kvstore/planning/x.py", "import json\nfrom kvstore.spec import ModelSpec\n") == []
    assert lint.check_source("clients/kvstore_client/x.py", "from kvstore.planning import decide\n") == []
    assert lint.check_source("kvstore/server/x.py", "from kvstore import __version__, controller\n") == []
    plane = "from kvstore_client.planes.place import Place\nisinstance(x, Place)\n"
    assert lint.check_source("clients/kvstore_client/planes/x.py", plane) == []
    assert lint.check_source("kvstore/server/x.py", "group.create_task(f())\n") == []
    assert lint.check_source("ops/x.py", "np.load('x', allow_pickle=False)\n") == []
    assert lint.check_source("kvstore/x.py", "def f():\n" + "    x = 1\n" * 59) == []
    assert lint.check_source("tests/x.py", "def f():\n" + "    x = 1\n" * 61) == []
    assert lint.check_source("kvstore/server/x.py", "import time  # seam: a reason\n") == []
    assert lint.check_source("kvstore/server/tiers.py", "from kvstore.tiers.nvme import NvmeTier\n") == []
    assert lint.check_source("kvstore/tiers/nvme/x.py", "x = residency >> 56\n") == []
    assert lint.check_source("kvstore/catalog/x.py", "residencies[row] &= ~UNPROVEN\n") == []
    assert lint.check_source("tests/x.py", "from kvstore.tiers.nvme import NvmeTier\n") == []


def test_the_rules_hold_for_one_room(tmp_path: Path) -> None:
    """``make check`` looks at the whole tree."""
    room = tmp_path / "kvstore" / "presence"
    room.mkdir(parents=True)
    (room / "table.py").write_text("import time\n", encoding="utf-8")
    assert [str(each) for each in lint.check_tree(tmp_path)] == [
        "kvstore/presence/table.py:1: imports time: take it from kvstore.seams"
    ]


def test_a_public_name_has_one_definition() -> None:
    sources = {
        "kvstore/a.py": "class A: ...\ndef _b(): ...\n",
        "clients/b.py": "def A(): ...\ndef _b(): ...\n",
    }
    assert [str(each) for each in lint.shared_names(sources)] == [
        "clients/b.py:1: A is defined in kvstore/a.py, clients/b.py: one name, one definition"
    ]
    sources.pop("clients/b.py")
    assert lint.shared_names(sources) == []
    aliases = {"kvstore/a.py": "Place = tuple[str, int]\n", "kvstore/b.py": "class Place:\n    pass\n"}
    assert len(lint.shared_names(aliases)) == 1, "the alias of a type is a name, too"


CIRCLES = {
    "two files": {
        "kvstore/a/x.py": "from kvstore.a.y import Y\n",
        "kvstore/a/y.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvstore.a.x import X\n",
    },
    "a long way round": {
        "kvstore/a/__init__.py": "from kvstore.a.x import X\n",
        "kvstore/a/x.py": "import kvstore.b.y\n",
        "kvstore/b/y.py": "def f():\n    from kvstore.c import z\n",
        "kvstore/c/z.py": "from kvstore.a import X\n",
    },
    "the client": {
        "clients/kvstore_client/a.py": "from kvstore_client.b.c import C\n",
        "clients/kvstore_client/b/c.py": "from kvstore_client.a import A\n",
    },
    "a file of its own room's front": {
        "kvstore/a/__init__.py": "from kvstore.a.x import X\n",
        "kvstore/a/x.py": "from kvstore.a import X\n",
    },
}


@pytest.mark.parametrize("name", CIRCLES)
def test_import_circles_are_found(name: str) -> None:
    files = CIRCLES[name]
    assert len([each for each in rooms.broken_rules(files) if "import circle" in each[2]]) == 1
    for path in files:  # without any one of its files there is no circle
        assert list(rooms.broken_rules({each: text for each, text in files.items() if each != path})) == []


def test_what_is_no_circle_is_not_found() -> None:
    diamond = {
        "kvstore/a/__init__.py": "from kvstore.a.x import X\nfrom kvstore.a.y import Y\n",
        "kvstore/a/x.py": "from kvstore.a.y import Y\nfrom kvstore.b import Z\n",
        "kvstore/a/y.py": "from kvstore.b import Z\n",
        "kvstore/b.py": "from kvstore.a.x import X  # seam: a reason\n",
    }
    assert list(rooms.broken_rules(diamond)) == []


def test_use_of_another_rooms_own_names_is_found() -> None:
    owner = "class A:\n    def _do(self):\n        self._x = 1\n\n\ndef _f(): ...\n"
    for use in ("a._do()", "a.b._x", "from kvstore.a.x import _f"):
        files = {"kvstore/a/x.py": owner, "kvstore/a/y.py": f"{use}\n", "kvstore/b/z.py": f"{use}\n"}
        assert [path for path, _, _ in rooms.broken_rules(files)] == ["kvstore/b/z.py"], use
    mine = {"kvstore/a/x.py": owner, "kvstore/b/z.py": "def _f(): ...\nself._do()\npoint._replace(x=1)\n"}
    assert list(rooms.broken_rules(mine)) == []


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
    assert contract.frozen(contract.breaking(before, contract_set(reserved=True))), "v1 never loses a field"


def test_naming_rules_are_found() -> None:
    assert contract.lint(contract_set()) == []
    assert "snake_case" in contract.lint(contract_set(name="Query"))[0]


def test_the_committed_contract_is_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert contract.check() == 0, capsys.readouterr().out


def one_file(change: str = "") -> descriptor_pb2.FileDescriptorSet:
    """A small contract with something of each sort, and one change to it."""
    files = descriptor_pb2.FileDescriptorSet()
    file = files.file.add(name="a/v1alpha/x.proto", package="a.v1alpha")
    outer = file.message_type.add(name="Outer")
    inner = outer.nested_type.add(name="Inner")
    kept = inner.field.add(name="kept", number=1, type=9, label=1)
    if change in ("into a oneof", "with presence"):
        kept.oneof_index, kept.proto3_optional = 0, change == "with presence"
        inner.oneof_decl.add(name="_kept" if kept.proto3_optional else "step")
    if change != "use what was reserved":
        inner.reserved_range.add(start=7, end=9)
    if change != "use a name that was reserved":
        inner.reserved_name.append("former")
    if not change.startswith("drop field"):
        inner.field.add(name="gone", number=3 if change == "renumber" else 2, type=9, label=1)
    if change in ("drop field, reserve number", "drop field, reserve both"):
        inner.reserved_range.add(start=2, end=3)
    if change in ("drop field, reserve name", "drop field, reserve both"):
        inner.reserved_name.append("gone")
    for name in ("GetRequest", "GetResponse"):
        if change != "drop message" or name != "GetResponse":
            file.message_type.add(name=name)
    state = file.enum_type.add(name="MyState")
    state.value.add(name="MY_STATE_UNSPECIFIED", number=0)
    if change != "drop value":
        state.value.add(name="MY_STATE_ON", number=2 if change == "renumber value" else 1)
    service = file.service.add(name="XService")
    if change != "drop method":
        output = ".a.v1alpha.Outer" if change == "retype method" else ".a.v1alpha.GetResponse"
        stream = change == "stream"
        service.method.add(name="Get", input_type=".a.v1alpha.GetRequest", output_type=output, server_streaming=stream)
    return files


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("drop field", "field a.v1alpha.Outer.Inner.gone was removed"),
        ("drop field, reserve number", "field a.v1alpha.Outer.Inner.gone was removed"),
        ("drop field, reserve name", "field a.v1alpha.Outer.Inner.gone was removed"),
        ("renumber", "field a.v1alpha.Outer.Inner.gone changed"),
        ("drop message", "message a.v1alpha.GetResponse was removed"),
        ("drop value", "enum value a.v1alpha.MyState.MY_STATE_ON was removed"),
        ("renumber value", "enum value a.v1alpha.MyState.MY_STATE_ON changed"),
        ("drop method", "method a.v1alpha.XService.Get was removed"),
        ("retype method", "method a.v1alpha.XService.Get changed"),
        ("stream", "method a.v1alpha.XService.Get changed"),
        ("into a oneof", "field a.v1alpha.Outer.Inner.kept changed"),
        ("with presence", "field a.v1alpha.Outer.Inner.kept changed"),
        ("use what was reserved", "message a.v1alpha.Outer.Inner reserves 7 to 8 no more"),
        ("use a name that was reserved", "message a.v1alpha.Outer.Inner reserves former no more"),
    ],
)
def test_each_breaking_change_is_named_and_only_it(change: str, named: str) -> None:
    found = contract.breaking(one_file(), one_file(change))
    assert len(found) == 1
    assert found[0].startswith(named)


def test_a_frozen_version_is_never_rebased() -> None:
    breaks = ["field kvstore.v1.A.b was removed", "enum value kvstore.v2.E.ON changed"]
    loose = [
        "field kvstore.v1alpha.A.b was removed",
        "field kvstore.v1alpha.A.c changed: 1 11 1 .kvstore.v1.X -> 1 9 1",
    ]
    assert contract.frozen([*breaks, *loose]) == breaks


def test_a_frozen_version_loses_no_field_in_whatever_order() -> None:
    before, after = one_file(), one_file("drop field, reserve both")
    for files in (before, after):
        files.file[0].package = "a.v1"
    assert contract.frozen(contract.breaking(before, after))


def test_what_is_frozen_is_made_of_nothing_that_is_not() -> None:
    files = contract._descriptors()
    file = next(each for each in files.file if each.package == "kvstore.v1")
    file.dependency.append("kvstore/v1alpha/admin.proto")
    assert ["is frozen and imports kvstore/v1alpha/admin.proto" in line for line in contract.lint(files)] == [True]


def test_what_peers_survive_is_not_breaking() -> None:
    assert contract.breaking(one_file(), one_file("drop field, reserve both")) == []
    assert contract.breaking(one_file("drop message"), one_file()) == []


@pytest.mark.parametrize(
    ("path", "name", "words"),
    [
        ("message_type", "outer", "not PascalCase"),
        ("message_type.nested_type.field", "isKept", "not snake_case"),
        ("enum_type.value", "UNSPECIFIED", "must begin with MY_STATE_"),
        ("enum_type.value", "MY_STATE_NONE", "must start with MY_STATE_UNSPECIFIED"),
        ("service", "X", "must end in Service"),
        ("service.method", "Put", "must use PutRequest"),
        ("", "b/v1/x.proto", "does not match its folder"),
    ],
)
def test_each_naming_rule_catches_a_bad_example(path: str, name: str, words: str) -> None:
    files = one_file()
    assert contract.lint(files) == []
    target = files.file[0]
    for step in filter(None, path.split(".")):
        target = getattr(target, step)[0]
    target.name = name
    assert any(words in line for line in contract.lint(files))
