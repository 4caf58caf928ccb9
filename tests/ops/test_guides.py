"""The guides' Python is run as written, in the order of the page, beside a real sidecar."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from tests.conftest import EXAMPLES, ROOT
from tests.ports import free_port

SAID = {
    "events.md": ["STORED watched 256 DRAM", "1 blocks known"],
    "bytes.md": ["LOCAL", "[True, False]", "True"],
    "cluster.md": [
        "0 NONE",
        "SHARED",
        "no tier of this level is configured: set tiers.s3.bucket",
        "1024",
        "131072",
        "131",
        "164",
        "9537",
    ],
    "controller.md": ["load 1792", "True", "(0, 2, 1)", "[(0, 4)]"],
    "engines.md": ["2000"],
    "kept-e.md": ["LOCAL", "256 196608", "256 (4, 256, 16)", "(256, 64)"],
    "reuse.md": [
        "[range(3, 303)]",
        "0 300",
        "512 DERIVED",
        "9",
        "[range(30, 230), range(230, 486)]",
        "200 EXACT",
        "456 DERIVED",
    ],
    "sglang.md": [],
    "transformers.md": ["0 LOCAL", "512 NONE"],
    "../README.md": ["LOCAL", "1000", "[8, 1000, 128] 1.0"],
}


def blocks_of(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def ran(blocks: list[str], environment: dict[str, str], place: Path) -> list[str]:
    """What each says that is run in a process of its own, all beside one sidecar."""
    said: list[str] = []
    with Sidecar("--capacity", "128 MiB", nvme="256 MiB", environment=environment) as sidecar:
        for block in blocks:
            own = {**environment, "KVSTORE_SOCKET": sidecar.address}
            done = EXAMPLES.run([sys.executable, "-c", block], timeout=100, env=own, cwd=place)
            assert done.returncode == 0, done.stderr
            said += done.stdout.splitlines()
    return said


@pytest.mark.parametrize("page", SAID)
def test_a_guide_runs_as_written(page: str, tmp_path: Path) -> None:
    ports = {"5557": str(free_port()), "5558": str(free_port())}  # the page's own may be taken here
    text = (ROOT / "docs" / page).read_text()
    for port, other in ports.items():
        text = text.replace(port, other)
    environment = {**os.environ, **dict(re.findall(r"^export (\w+)=(\S+)$", text, re.MULTILINE))}
    said = ran(blocks_of(text), environment, tmp_path)
    if page == "sglang.md":
        assert re.fullmatch(r"[0-9a-f]{64}", said[0])
    else:
        assert said == SAID[page]


WORDS = {
    "profile.md": ("\nprofile sibling.json\n", "\nplot    sibling.png\n"),
    "remote.md": ("\nremote\nMEMORY\n(8, 1000, 128)\n", "\nremote 1\n", "kvstore 0."),
    "tenants.md": ("\nLOCAL\n1000\nCOLD\nremote 1000\nremote 0\n", "\n│ default ", "\n│ red ", '"tenant": "red"'),
}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the guides make certificates and secrets with openssl")
@pytest.mark.parametrize("page", WORDS)
def test_a_guide_of_commands_runs_as_written(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / page).read_text().replace("9500", str(free_port()))
    script = "set -e\n" + "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-c", f"trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n{script}"]
    with (tmp_path / "said").open("w+") as said:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=100, env=environment, cwd=tmp_path,
            check=False,
        )  # fmt: skip
        said.seek(0)
        words = said.read()
    assert done.returncode == 0, words
    words = "\n" + "\n".join(line for line in words.splitlines() if not line.startswith("{")) + "\n"  # without the log
    for line in WORDS[page]:
        assert line in words


STARTS = {"../README.md": {"nvme"}, "cluster.md": {"nvme", "redis"}, "events.md": {"nvme"}}
"""Pages that have a reader start a sidecar at its default place, and the tiers that it has then."""


@pytest.mark.parametrize("page", STARTS)
def test_a_sidecar_starts_as_written(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / page).read_text()
    for port in ("5557", "5558"):
        text = text.replace(port, str(free_port()))
    block = [
        each for each in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if re.search(r"^kvstore serve", each, re.M)
    ][-1]
    script = "\n".join(line.removesuffix(" &") for line in block.splitlines() if re.match("export|kvstore serve", line))
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path), "KVSTORE__ARENA__CAPACITY_BYTES": "32 MiB",
        "KVSTORE__TIERS__NVME__CAPACITY_BYTES": "64 MiB", "KVSTORE__SERVER__METRICS_PORT": str(free_port()),
    }  # fmt: skip
    command = ["bash", "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 60.0)[0]
            assert "ready" in process.stdout.readline()
            with connect(f"unix://{tmp_path}/kvstore/kvstore.sock") as client:
                assert {tier.name for tier in client.stats().tiers} == STARTS[page]
        finally:
            os.killpg(process.pid, signal.SIGTERM)
