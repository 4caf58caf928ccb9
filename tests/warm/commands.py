"""The commands as the first ``serve`` leaves them: its options built, and the settings' types looked up. Sidecars that
start warm find them."""

from __future__ import annotations

from kvstore_ops.cli import command

from kvstore.config import load

PLACES = ["--state-directory", "/nowhere", "--socket-directory", "/nowhere/run"]

with command().make_context("kvstore", ["serve", *PLACES]) as context:
    name, serve, rest = command().resolve_command(context, ["serve", *PLACES, "--capacity", "8 MiB", "--nvme", "0"])
    serve.make_context(name, rest, parent=context).close()
load(None, {}, {})
