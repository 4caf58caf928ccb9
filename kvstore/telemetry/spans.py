"""Spans by OpenTelemetry, sent by OTLP to the endpoint that the settings name. Imported only where they name one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvstore import __version__
from kvstore.config import TracingSettings
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.seams.scheduler import start_thread
from kvstore.telemetry.tracing import TRACE_HEADERS, SpanValue, TraceSpan

QUEUE_COUNT_MAX = 2048
"""Spans that wait to be sent. Further spans are dropped."""
EXPORT_S_MAX = 5.0
CLOSE_S_MAX = 2.0
"""Seconds that a stop waits for the receiver of spans."""
HEADER_CHARACTERS_MAX = 512


class Spans:
    """Sends sampled spans from a thread of its own. Requests go on even if the receiver fails."""

    is_on = True

    def __init__(self, provider: Any, modules: Any) -> None:
        """``modules``: OpenTelemetry's ``trace``, and its propagator of trace contexts."""
        self._provider = provider
        self._trace, self._propagator = modules
        self._tracer = provider.get_tracer("kvstore", __version__)
        self._is_closed = False

    @contextmanager
    def call(self, name: str, metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[TraceSpan]:
        """See ``Tracing.call``. An invalid or missing trace context is ignored."""
        carried = {
            key: value
            for key, value in metadata
            if key in TRACE_HEADERS and isinstance(value, str) and len(value) <= HEADER_CHARACTERS_MAX
        }
        parent = (
            self._propagator.extract(carried) if carried else self._trace.set_span_in_context(self._trace.INVALID_SPAN)
        )
        with self._begun(name, {}, context=parent, kind=self._trace.SpanKind.SERVER) as span:
            yield span

    @contextmanager
    def span(self, name: str, **attributes: SpanValue) -> Iterator[TraceSpan]:
        """See ``Tracing.span``. Work outside of any call makes no span; the call that it belongs to may have ended."""
        if not self._trace.get_current_span().get_span_context().is_valid:
            yield _Told(self._trace.INVALID_SPAN)
            return
        with self._begun(name, attributes) as span:
            yield span

    @contextmanager
    def _begun(self, name: str, attributes: dict[str, SpanValue], **how: Any) -> Iterator[TraceSpan]:
        told = {f"kvstore.{key}": value for key, value in attributes.items()}
        with self._tracer.start_as_current_span(
            name, attributes=told, record_exception=False, set_status_on_exception=False, **how
        ) as span:
            try:
                yield _Told(span)
            except BaseException as error:
                # Only the kind of the failure: a message may contain a name that not everybody may see.
                reason = error.status if isinstance(error, KVStoreError) else type(error).__name__
                span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, reason))
                raise

    def close(self) -> None:
        """See ``Tracing.close``."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(Unavailable):  # no thread for it: what was not sent is lost
                start_thread(self._provider.shutdown, "spans").join(CLOSE_S_MAX)


class _Told:
    """A span of OpenTelemetry, as a ``TraceSpan``."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def note(self, **attributes: SpanValue) -> None:
        self._span.set_attributes({f"kvstore.{key}": value for key, value in attributes.items()})


def open_spans(settings: TracingSettings, node: str) -> Spans:
    """Begin to send spans. Raises InvalidRequest where OpenTelemetry is not installed."""
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError as error:
        raise InvalidRequest(
            f"tracing.endpoint = {settings.endpoint} needs OpenTelemetry, which is not installed ({error}): "
            "pip install 'kvstore[tracing]', or leave tracing.endpoint empty",
            setting="tracing.endpoint",
        ) from error
    one_in = settings.sample_one_in
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(1 / one_in) if one_in else ALWAYS_OFF),
        resource=Resource({"service.name": "kvstore", "service.version": __version__, "service.instance.id": node}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(
        endpoint=settings.endpoint, insecure=settings.endpoint.startswith("http://"), timeout=EXPORT_S_MAX
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE_COUNT_MAX))
    logging.getLogger("opentelemetry").handlers[:] = logging.getLogger("kvstore").handlers
    return Spans(provider, (trace, TraceContextTextMapPropagator()))
