"""Counters and logs. The doors, the controller and movement record here; tiers, catalog and policies know nothing of
counters."""

from kvstore.telemetry.counters import Counters
from kvstore.telemetry.logs import configure_logging, log_as, log_on_as

__all__ = ["Counters", "configure_logging", "log_as", "log_on_as"]
