"""The profiles that come with the testbed's weights, as ``kvstore profile`` measured them.

There is a file per pair and kind of reuse, and a picture beside it. They are made by

    kvstore profile l12-s2 --reuse both --sender l12-s2-plus3 --out .../l12-s2-both-plus3.json

and must be measured again when the weights, or the meaning of a setting, change.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from kvstore.errors import InvalidRequest
from kvstore.planning import Profile
from kvstore_ops.profiling.subject import spec_of

PROFILES = Path(str(resources.files("kvstore_ops.profiling"))) / "profiles"


def shipped_path(receiver: str, reuse: str, sender: str | None = None) -> Path:
    """Return the path of a profile. Its name has the receiver, the reuse, and the sender's suffix."""
    kind = "" if sender is None else f"-{sender.removeprefix(receiver + '-')}"
    return PROFILES / f"{receiver}-{reuse}{kind}.json"


def shipped_profile(receiver: str, reuse: str, sender: str | None = None) -> Profile:
    """Return a shipped profile. Raises: InvalidRequest when there is none, or it was measured on other weights than the
    shipped ones."""
    path = shipped_path(receiver, reuse, sender)
    if not path.exists():
        having = f" --sender {sender}" if sender else ""
        raise InvalidRequest(
            f"no profile {path.name} comes with the weights: kvstore profile {receiver} --reuse {reuse}{having}"
        )
    found = Profile.from_json(path.read_text(encoding="utf-8"))
    found.check(spec_of(receiver), None if sender is None else spec_of(sender))
    if found.reuse != reuse:
        raise InvalidRequest(f"{path.name} is of {found.reuse!r} reuse, not {reuse!r}")
    return found
