"""The demo's signs of life: on a terminal one line that is written over, elsewhere a line for each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def progress(console: Console, step: str) -> Iterator[Callable[[str], None]]:
    """Show a step while the context lasts. Yields a function that shows the next step in its place."""
    with console.status(step) as status:

        def tell(step: str) -> None:
            status.update(step)
            if not console.is_terminal:
                console.print(f"  {step}")

        tell(step)
        yield tell
