"""The commands of docs/vllm.md, as they stand there, beside a sidecar at its default place."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
ROUND = ["hits_total 0.0", "hits_total 288.0"]
"""The first engine computes the prompt and says so; the second one loads it."""
SAID = {
    "Start": ROUND,
    "Prefill on one engine, decoding on another": ["kept: {'kvstore_prefilled': 288}", "hits_total 288.0"],
    "By vLLM's own block hashes": [*ROUND, "256 tokens, block 7", "32 tokens, block 8"],
    "Documents, at any place": ["reused: 320"],
    "Images and sounds: the encoder cache": ["found: 0", "found: 1"],
    "A tier of vLLM's CPU offloading": ROUND,
}
PAGE = (ROOT / "docs" / "vllm.md").read_text()


def blocks_of(section: str) -> str:
    _, _, text = PAGE.partition(f"\n## {section}\n")
    found = re.findall(r"```bash\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)
    assert found
    return "".join(found)


def script_of(section: str) -> str:
    """The section's commands, after what the page begins with. It is installed already, and needs no ``make``."""
    start = re.sub(r"^(make|source) .*\n", "", blocks_of("Start"), flags=re.MULTILINE)
    rest = ""
    if section != "Start":
        start, rest = re.sub(r"^ask .*\n", "", start, flags=re.MULTILINE), blocks_of(section)
    return f"trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n{start}{rest}".replace("8123", str(free_port())).replace(
        "8124", str(free_port())
    )


@pytest.mark.parametrize("section", SAID)
def test_the_guide_runs_as_written(section: str, tmp_path: Path) -> None:
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path), "KVSTORE__ARENA__CAPACITY_BYTES": "64 MiB",
        "KVSTORE__TIERS__NVME__CAPACITY_BYTES": "64 MiB",
    }  # fmt: skip
    with (tmp_path / "said").open("w+") as said, (tmp_path / "problems").open("w") as problems:
        command = ["bash", "-c", script_of(section)]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=problems, env=environment, cwd=ROOT,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                process.wait(880)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        lines = [re.sub(r"^vllm:external_prefix_cache_(hits_total)\{.*\}", r"\1", line.rstrip()) for line in said]
    found = [
        line for line in lines if line.startswith(("hits_total", "found: ", "reused: ", "kept: ")) or ", block " in line
    ]
    assert found == SAID[section], "\n".join([*lines, (tmp_path / "problems").read_text()[-3000:]])
