"""Planning, and the client's gate over real profiles, in a process that has no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

DECIDES = """
from kvstore.planning import Facts, Holding, Pair, Profile, Recompute, Ruling, decide
from kvstore.spec import ModelSpec

spec = ModelSpec.dense("m", "a1" * 32, layer_count=4, kv_heads=2, head_dim=16, hidden_size=64, vocab_size=96)
other = ModelSpec.dense("n", "b2" * 32, layer_count=4, kv_heads=2, head_dim=16, hidden_size=64, vocab_size=96)
facts = Facts(spec, 100, 99, Holding(None, 20), (Holding(other, 80),), Recompute.cacheblend(1, 0.2))
assert decide(facts).reused_token_count == 80
loaded = {"grpc", "kvstore.seams", "kvstore.telemetry", "kvstore.server", "kvstore_client"} & {
    name for name, module in sys.modules.items() if module is not None
}
assert not loaded, loaded
"""

ASKS_THE_GATE = """
import tempfile
from pathlib import Path

from kvstore_client import Gate, ModelSpec
from kvstore_client.gate.profiles import Profiles
from kvstore.planning import Calibration, Pair, Point, Profile, Recompute, Side
from kvstore.spec import Provenance

spec = ModelSpec.dense("m", "a1" * 32, layer_count=4, kv_heads=2, head_dim=16, hidden_size=64, vocab_size=96)
point = Point(Recompute.cacheblend(1, 0.2), 0.4, 0.95, 0.01, 0.001, 0.01)
pair = Pair.of(spec, None, "position", Provenance.STANDALONE)
profile = Profile(
    receiver=Side.of(spec), sender=None, reuse="position", provenance=Provenance.STANDALONE, layer_count=4,
    calibration=Calibration("c3" * 32, (1,), 64, 512, 32), full_quality=0.95, full_standard_error=0.01,
    points=(point,), measured_at_s=1_700_000_000,
)
with tempfile.TemporaryDirectory() as directory:
    profiles, gate = Profiles(Path(directory)), Gate(Path(directory))
    assert gate.permit(spec, None, "position").setting is None
    profiles.write(profile, profiles.path(pair))
    assert gate.permit(spec, None, "position").setting == point.setting
    assert gate.is_due(gate.permit(spec, None, "position"))
"""


def run(script: str, *missing: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter in which some modules cannot be imported."""
    head = f"import sys\nfor name in {missing!r}:\n    sys.modules[name] = None\n"
    return subprocess.run([sys.executable, "-c", head + script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("script", "missing"),
    [(DECIDES, ("torch", "grpc", "kvstore.seams", "kvstore_kernels")), (ASKS_THE_GATE, ("torch", "kvstore_kernels"))],
    ids=["decide", "gate"],
)
def test_it_works_where_torch_cannot_be_imported(script: str, missing: tuple[str, ...]) -> None:
    assert run("import torch", *missing).returncode != 0, "torch can be imported: the test would show nothing"
    done = run(script, *missing)
    assert done.returncode == 0, done.stderr
