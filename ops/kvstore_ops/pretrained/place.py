"""The model's directory, and the check that it is whole."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

MODEL_ID = "smollm2-135m-instruct"
DIRECTORY_VARIABLE = "KVSTORE_MODEL_DIRECTORY"
NOTE = "kvstore-model.json"
"""File with the origin of the directory and its files' lengths. It is written last."""
REMEDY = f"make model unpacks it (94 MB to download); {DIRECTORY_VARIABLE} names another directory"

SIBLING_REMEDY = "python -m kvstore_ops.pretrained sibling makes it, in minutes"


@dataclass(frozen=True)
class Absent:
    """The reason why there is no pretrained model, or no sibling of it; as text, with the remedy."""

    reason: str
    remedy: str = REMEDY

    def __str__(self) -> str:
        return f"{self.reason}: {self.remedy}"


def model_directory() -> Path:
    """Return $KVSTORE_MODEL_DIRECTORY, else ``kvstore/models/smollm2-135m-instruct`` in the user's cache directory."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(named) if named else Path(cache) / "kvstore" / "models" / MODEL_ID


def sibling_directory() -> Path:
    """Return the directory of the model's sibling, beside the model's."""
    place = model_directory()
    return place.with_name(f"{place.name}-sibling")


def pretrained(directory: Path | None = None) -> Path | Absent:
    """Return the directory of the model, or the reason why there is none. Cost: one file is read. The weights are not
    checked here, because their digest is in every key that is made of them."""
    return _whole(directory or model_directory(), "pretrained model", REMEDY)


def sibling(directory: Path | None = None) -> Path | Absent:
    """Return the directory of the model's sibling, or the reason why there is none."""
    return _whole(directory or sibling_directory(), "sibling", SIBLING_REMEDY)


def _whole(place: Path, what: str, remedy: str) -> Path | Absent:
    try:
        found = json.loads((place / NOTE).read_text(encoding="utf-8"))
        lengths = {name: (place / name).stat().st_size for name in found["files"]}
    except FileNotFoundError:
        return Absent(f"no {what} in {place}", remedy)
    except (OSError, ValueError, TypeError, KeyError) as error:
        return Absent(f"the {what} in {place} cannot be read ({error})", remedy)
    if lengths != found["files"]:
        return Absent(f"the {what} in {place} is not whole: remove that directory", remedy)
    return place
