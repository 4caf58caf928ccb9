"""Counters and logs. Only the server and the controller record here; tiers, catalog and policies know nothing
of it."""

from kvstore.telemetry.counters import Counters
from kvstore.telemetry.logs import configure_logging

__all__ = ["Counters", "configure_logging"]
