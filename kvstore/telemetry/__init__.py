"""Counters, logs, and spans where a setting asks for them. The doors, the controller and movement record here; tiers,
catalog and policies do not."""

from kvstore.telemetry.counters import Counters
from kvstore.telemetry.logs import BoundedLines, configure_logging, drop_output, log_as, log_on_as, set_log_level
from kvstore.telemetry.tracing import NO_TRACING, TRACE_HEADERS, TraceSpan, Tracing

__all__ = [
    "NO_TRACING",
    "TRACE_HEADERS",
    "BoundedLines",
    "Counters",
    "TraceSpan",
    "Tracing",
    "configure_logging",
    "drop_output",
    "log_as",
    "log_on_as",
    "set_log_level",
]
