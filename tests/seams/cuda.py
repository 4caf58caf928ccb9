"""A stand-in for the CUDA driver, compiled where a test needs it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("cuda_stand_in.c")


def compiled(directory: Path) -> Path:
    """Return a directory with a libcuda.so.1 of the host's memory. Without a compiler the test is skipped."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = directory / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True)
    return directory
