"""The guides' Python is run as written, in the order of the page, beside a real sidecar."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kvstore_ops.sidecar import Sidecar

from tests.conftest import ROOT

SAID = {
    "events.md": ["STORED watched 256 DRAM", "1 blocks known"],
    "bytes.md": ["LOCAL", "[True, False]", "True"],
    "kept-e.md": ["LOCAL", "256 196608", "256 (4, 256, 16)", "(256, 64)"],
    "sglang.md": [],
}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("page", SAID)
def test_a_guide_runs_as_written(page: str, tmp_path: Path) -> None:
    ports = {"5557": free_port(), "5558": free_port()}  # the page's own may be taken here
    text = (ROOT / "docs" / page).read_text()
    for port, other in ports.items():
        text = text.replace(port, other)
    environment = {**os.environ, **dict(re.findall(r"^export (\w+)=(\S+)$", text, re.MULTILINE))}
    with Sidecar("--capacity", "128 MiB", nvme="256 MiB", environment=environment) as sidecar:
        environment["KVSTORE_SOCKET"] = sidecar.address
        said = []
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
            script = tmp_path / f"{number}.py"
            script.write_text(block)
            done = subprocess.run(
                [sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=environment, check=False
            )
            assert done.returncode == 0, done.stderr
            said += done.stdout.splitlines()
    if page == "sglang.md":
        assert re.fullmatch(r"[0-9a-f]{64}", said[0])
    else:
        assert said == SAID[page]


WORDS = {
    "profile.md": ("\nprofile sibling.json\n", "\nplot    sibling.png\n"),
    "remote.md": ("\nremote\nMEMORY\n(8, 1000, 128)\n", "\nremote 1\n"),
    "tenants.md": ("\nLOCAL\n1000\nCOLD\nremote 1000\nremote 0\n", "\n│ default ", "\n│ red ", '"tenant": "red"'),
}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the guides make certificates and secrets with openssl")
@pytest.mark.parametrize("page", WORDS)
def test_a_guide_of_commands_runs_as_written(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / page).read_text().replace("9500", free_port())
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
