"""One line, weakened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """``line`` (one or more, unique in ``file``) becomes ``mutated``; then ``why`` would follow, and one of ``tests``
    (pytest's node ids) fails. ``hangs``: it fails by waiting until its time is up. Without that a hang is no notice."""

    name: str
    file: str
    line: str
    mutated: str
    why: str
    tests: tuple[str, ...]
    hangs: bool = False

    def source(self, root: Path) -> str:
        """The file's text with the line weakened. Raises LookupError when the line is not there, or not once."""
        text = (root / self.file).read_text(encoding="utf-8")
        count = text.count(self.line)
        if count != 1:
            raise LookupError(f"{self.name}: its line is {count} times in {self.file}: {self.line!r}")
        return text.replace(self.line, self.mutated)
