"""The gate in use: a profiled sibling is reused, checked, and reused no more once the receiver is not what it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Client, Exactness, Recompute, connect
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.gate import Gate
from kvstore_client.gate.profiles import Profiles
from kvstore_client.recompute import Recomputed, recompute
from kvstore_ops.profiling.profiler import point_of
from kvstore_ops.profiling.subject import Measured, TestbedSubject
from kvstore_ops.sidecar import Sidecar
from kvstore_ops.testbed import calibration, contexts, load
from kvstore_ops.testbed.task import CHUNK_TOKENS

from kvstore.planning import Calibration, Pair, Profile, Side
from kvstore.spec import Provenance

SETTING = Recompute.droidspeak(0, 1)
"""Three answers of four are right with a mild sibling's cache, and hardly any when the receiver is a harsh one."""
RECEIVER, SENDER, CHANGED = "l6-s2", "l6-s2-mild", "l6-s2-plus11"
CONTEXTS = 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operations this small wait longer for a second thread than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def client(sidecar: Sidecar, tmp_path: Path) -> Iterator[Client]:
    with connect(sidecar.address) as connected:
        connected.gate = Gate(tmp_path, floor=0.6, check_every=4)
        yield connected


def runner_of(name: str) -> TransformersRunner:
    return TransformersRunner(load(name)[0], chunk_tokens=CHUNK_TOKENS)


class Unwatched(TransformersRunner):
    """As an engine's own runner may be: it does not look whether its weights are still the spec's."""

    def check(self) -> None:
        pass


def measured(directory: Path, at_s: int) -> Profile:
    """A profile of one setting, in its place."""
    subject = TestbedSubject(RECEIVER, "sibling", SENDER, calibration(), CONTEXTS)
    full: Measured = subject.full()
    every = range(len(full.by_context))
    point = point_of(SETTING, subject.measure(SETTING, every, lambda _: None), full, subject.calibration.answers)
    made = Profile(
        receiver=Side.of(subject.receiver), sender=Side.of(runner_of(SENDER).spec), reuse="sibling",
        provenance=Provenance.IN_CONTEXT, layer_count=6, calibration=Calibration("aa" * 32, (1,), 16, 128, 8),
        full_quality=float(np.mean(full.by_context)), full_standard_error=0.0, points=(point,), measured_at_s=at_s,
    )  # fmt: skip
    profiles = Profiles(directory)
    pair = Pair.of(subject.receiver, runner_of(SENDER).spec, "sibling", Provenance.IN_CONTEXT)
    profiles.write(made, profiles.path(pair))
    return made


def test_a_model_that_changed_under_its_profile_is_noticed_and_reuse_ends(client: Client, tmp_path: Path) -> None:
    receiver, sender = Unwatched(load(RECEIVER)[0], chunk_tokens=CHUNK_TOKENS), runner_of(SENDER)
    drawn = [torch.from_numpy(each) for each in contexts(calibration(), CONTEXTS).tokens]
    for tokens in drawn:
        made = recompute(sender, tokens[:192], [], Recompute.full(6))
        client.store(sender.spec, tokens[:192], made.kv).wait(10.0)

    refused = client.partial_prefill(receiver, drawn[0], senders=[sender.spec])
    assert refused.exactness is Exactness.EXACT
    assert "no valid profile" in refused.plan.reason

    measured(tmp_path, 1)
    found = [client.partial_prefill(receiver, tokens, senders=[sender.spec]) for tokens in drawn]
    checked = [each for each in found if "checked" in each.plan.reason]
    reused = [each for each in found if each.plan.recompute == SETTING]
    assert len(checked) + len(reused) == CONTEXTS
    assert reused
    assert {each.exactness for each in checked} == {Exactness.EXACT}
    assert {each.exactness for each in reused} == {Exactness.DERIVED}
    assert client.statistics()["drift_checks"] == len(checked) >= CONTEXTS // 4
    assert client.statistics()["lossy_switched_off"] == 0

    # The weights change in place: the spec, which digested them before, is none the wiser.
    receiver.model.load_state_dict(load(CHANGED)[0].state_dict())
    wrong = 0
    for tokens in drawn:
        last = client.partial_prefill(receiver, tokens, senders=[sender.spec])
        wrong += last.exactness is Exactness.DERIVED
        if client.statistics()["lossy_switched_off"]:
            break
    # Once one answer was found to mislead, every one was checked, and the checked ones are answered in full.
    assert wrong < 4
    assert "switched off" in last.plan.reason
    last = client.partial_prefill(receiver, drawn[0], senders=[sender.spec])
    assert last.exactness is Exactness.EXACT
    assert "switched off" in last.plan.reason
    assert client.statistics()["lossy_switched_off"] == 1

    measured(tmp_path, 2)
    last = client.partial_prefill(receiver, drawn[0], senders=[sender.spec])
    assert "switched off" not in last.plan.reason
    assert last.plan.recompute == SETTING or "checked" in last.plan.reason


def test_a_check_holds_one_cache_at_a_time(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the full prefill begins, the lossy one's cache is gone."""
    measured(tmp_path, 1)
    receiver, sender = runner_of(RECEIVER), runner_of(SENDER)
    tokens = torch.from_numpy(contexts(calibration(), 8).tokens[2])
    client.store(sender.spec, tokens[:192], recompute(sender, tokens[:192], [], Recompute.full(6)).kv).wait(10.0)
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(*arguments: Any, **named: Any) -> Recomputed:
        gc.collect()
        alive.append(sum(each() is not None for each in made))
        found = recompute(*arguments, **named)
        made.append(weakref.ref(found.kv[0][0]))
        return found

    alive: list[int] = []
    monkeypatch.setattr("kvstore_client.recompute.prefill.recompute", watched)
    found = client.partial_prefill(receiver, tokens, senders=[sender.spec])
    assert "checked" in found.plan.reason
    assert alive == [0, 0]


def test_a_setting_of_the_callers_own_needs_no_profile(client: Client) -> None:
    receiver, sender = runner_of(RECEIVER), runner_of(SENDER)
    tokens = torch.from_numpy(contexts(calibration(), 8).tokens[1])
    made = recompute(sender, tokens[:192], [], Recompute.full(6))
    client.store(sender.spec, tokens[:192], made.kv).wait(10.0)
    found = client.partial_prefill(receiver, tokens, senders=[sender.spec], recompute=SETTING)
    assert found.plan.recompute == SETTING
    assert client.statistics()["drift_checks"] == 0
