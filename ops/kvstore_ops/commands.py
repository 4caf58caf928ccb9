"""Commands in modules of their own. They are imported when one of them is called, so that a sidecar starts without
modules that only operators need."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperGroup

from kvstore.errors import InvalidRequest
from kvstore_ops.extras import needed
from kvstore_ops.options import INTERRUPTED

MODULES = (
    "planning",
    "fleet.command",
    "plans",
    "operators.reading",
    "operators.changing",
    "operators.warming",
    "doctor.command",
    "top.screen",
)
"""Each of these modules has ``register``, which adds its commands to an app."""

PANELS = {
    "The service": ("serve", "config", "reload", "doctor", "version"),
    "What is there": ("status", "top", "tiers", "models", "ls", "show", "locate", "watch", "plans"),
    "Change what is there": ("evict", "pin", "unpin", "move", "prefetch", "warm", "drain", "verify", "scan"),
    "Try and measure": ("demo", "bench", "plan", "profile", "fleet"),
}
"""The commands as ``kvstore --help`` shows them."""


class Commands(TyperGroup):
    """The commands of ``cli``, then those of ``MODULES``."""

    _are_imported = False

    def invoke(self, ctx: Any) -> Any:
        """Run a command. An interrupt ends it with the code that shells give it. Raises InvalidRequest naming the extra
        where the command needs a package of one."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except ModuleNotFoundError as error:
            raise needed(error) or error from error

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # typer's types of these are private
        if cmd_name not in self.commands:
            self._import_all()
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return a command and its arguments. Raises InvalidRequest for an option without a value: in a script it comes
        of a variable that is not set, and a command without the option would mean more chunks, or another tenant."""
        name, command, rest = super().resolve_command(ctx, args)
        for before, text in pairwise(["", *rest]):
            named, _, value = text.partition("=")
            option = before if not text else named if named != text and not value else ""
            if option.startswith("--") and option != "--":
                raise InvalidRequest(f"{option} is empty: give it a value, or leave it out")
        return name, command, rest

    def list_commands(self, ctx: Any) -> list[str]:
        self._import_all()
        for panel, names in PANELS.items():
            for name in names:
                command: Any = self.commands[name]  # typer's commands have a panel, those they descend from have none
                command.rich_help_panel = panel
        told = [name for names in PANELS.values() for name in names]
        return told + [name for name in super().list_commands(ctx) if name not in told]

    def _import_all(self) -> None:
        if self._are_imported:
            return
        self._are_imported = True
        app = typer.Typer(add_completion=False)
        for name in MODULES:
            import_module(f"kvstore_ops.{name}").register(app)
        self.commands.update(typer.main.get_group(app).commands)
