"""Packages that only some commands need. Each comes with an extra of kvstore."""

from __future__ import annotations

from types import MappingProxyType

from kvstore.errors import InvalidRequest

EXTRAS = MappingProxyType(
    {
        "torch": "demo", "transformers": "demo", "safetensors": "demo", "tokenizers": "demo", "matplotlib": "demo",
        "opentelemetry": "tracing", "grpc_tools": "dev",
    }
)  # fmt: skip
"""The extra by the package's name. What tiers need is not here: they say it themselves."""


def needed(error: ModuleNotFoundError) -> InvalidRequest | None:
    """Return the error that says what to install; None: the module is none of an extra, and its lack is a bug."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return InvalidRequest(f"this needs the package {package}: pip install 'kvstore[{EXTRAS[package]}]'")
