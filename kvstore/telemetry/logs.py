"""Structured logs on stderr: one JSON object a line, or text for people. Lines about a tenant's work name the
tenant."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

from kvstore.seams import Clock

MINUTE_LINES_MAX = 100
_tenant = ContextVar("tenant", default="")
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def drop_output() -> None:
    """Have what is still written to standard output go nowhere, once its reader has gone or its disk is full: a flush
    at the end would fail again. What a program has put in its place without a file stays as it is."""
    try:
        lost = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # no output at all, no file below it, or closed
        return
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, lost)
    os.close(nowhere)


@contextmanager
def log_as(tenant: str) -> Iterator[None]:
    """Have log lines name this tenant: those written inside the context, and by every task made inside it."""
    token = _tenant.set(tenant)
    try:
        yield
    finally:
        _tenant.reset(token)


def log_on_as(tenant: str) -> None:
    """As ``log_as``, for the rest of the calling task."""
    _tenant.set(tenant)


class BoundedLines:
    """Log lines that peers can cause without end: ``MINUTE_LINES_MAX`` in a minute, because the log has a disk that
    others need. The first line after some were left out says how many."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._minute = -1
        self._count = 0

    def line(self, level: int, message: str, **fields: object) -> None:
        """Log a line, unless this minute has had its lines."""
        if not self._log.isEnabledFor(level):
            return
        minute, left_out = int(self._clock.monotonic() // 60), 0
        if minute != self._minute:
            left_out = max(0, self._count - MINUTE_LINES_MAX)
            self._minute, self._count = minute, 0
        self._count += 1
        if self._count <= MINUTE_LINES_MAX:
            self._log.log(level, message, extra={**fields, **({"left_out": left_out} if left_out else {})})


class _TenantFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if tenant := _tenant.get():
            record.tenant = tenant
        return True


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: value for name, value in vars(record).items() if name not in _OWN})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in _OWN)
        when = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = _on_one_line(f"{when} {record.levelname.lower():7} {record.getMessage()} {fields}".rstrip())
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _on_one_line(text: str) -> str:
    """Return the text with line ends and control characters escaped: clients choose names, and a name must not look
    like another line or steer a terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def configure_logging(level: str, form: str) -> None:
    """Send the service's logs to stderr. ``form`` is "json" or "text"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_TenantFilter())
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    root = logging.getLogger("kvstore")
    root.handlers[:] = [handler]
    root.propagate = False
    set_log_level(level)


def set_log_level(level: str) -> None:
    """Log from this level on: "debug", "info", "warning" or "error"."""
    logging.getLogger("kvstore").setLevel(level.upper())
