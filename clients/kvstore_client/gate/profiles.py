"""The store of profiles: a file per pair, named by the models' weights, and beside it a note if it was switched off."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.planning import Pair, Profile
from kvstore.planning.profile import AGAIN, PROFILE_BYTES_MAX, parsed


def default_directory() -> Path:
    """Return ``profiles`` in the user's state directory: $XDG_STATE_HOME/kvstore, else ~/.local/state/kvstore. For a
    user without a home directory "~" stays in the path, where pathlib would raise."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "kvstore" / "profiles"


class Profiles:
    """A directory of profiles. Safe to share between threads and processes: files are replaced whole."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or default_directory()

    def path(self, pair: Pair) -> Path:
        return self.directory / pair.file_name

    def has(self, pair: Pair) -> bool:
        """True when a file of the pair is there, be it valid or not. Cost: a stat call."""
        return _stamp(self.path(pair)) is not None

    def stamp(self, pair: Pair) -> tuple[object, ...]:
        """Return a value that changes when the profile or the note beside it does. Cost: two stat calls."""
        return tuple(_stamp(path) for path in (self.path(pair), _note(self.path(pair))))

    def read(self, pair: Pair) -> Profile | None:
        """Return the pair's profile, or None. Raises: InvalidRequest for a file that is no profile, Unavailable for a
        file that cannot be read."""
        text = _text(self.path(pair))
        if text is None:
            return None
        try:
            return Profile.from_json(text)
        except InvalidRequest as error:
            raise InvalidRequest(f"{self.path(pair)}: {error.message}") from error

    def write(self, profile: Profile, path: Path) -> None:
        """Put a profile in its place, and delete the note that switched off the old one."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _replace(path, profile.to_json())
        _note(path).unlink(missing_ok=True)

    def switch_off(self, pair: Pair, profile: Profile, reason: str) -> None:
        """Leave a note for every process, until there is another profile. Raises: Unavailable when it cannot be
        written."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(_note(self.path(pair)), json.dumps({"profile": profile.digest, "reason": reason}) + "\n")
        except OSError as error:
            raise Unavailable(f"{_note(self.path(pair))}: {error.strerror}") from error

    def switched_off(self, pair: Pair, profile: Profile) -> str:
        """Return why this profile was switched off; empty when it was not. An invalid note counts as switched off.
        Raises: Unavailable for a note that cannot be read."""
        note = _note(self.path(pair))
        try:
            text = _text(note)
            if text is None:
                return ""
            found = parsed(text, str(note))
            return str(found["reason"]) or "lossy reuse was switched off" if found["profile"] == profile.digest else ""
        except (InvalidRequest, KeyError, TypeError):
            return f"{note} cannot be read: {AGAIN}"


def _note(path: Path) -> Path:
    return path.with_suffix(".off.json")


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            found = file.read(PROFILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from error
    if len(found) > PROFILE_BYTES_MAX:
        raise InvalidRequest(f"{path} is larger than {PROFILE_BYTES_MAX} bytes: no profile; {AGAIN}")
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not text: no profile; {AGAIN}") from error


def _replace(path: Path, text: str) -> None:
    """Replace a file, whole or not at all, also when the machine stops."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
