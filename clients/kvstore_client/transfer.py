"""Fetches that run beside the engine: by ticket, into the engine's own memory, layer by layer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvstore.errors import DataLoss, DeadlineExceeded, Internal, InvalidRequest, KVStoreError, Unavailable
from kvstore.keys import DIGEST_BYTES
from kvstore.seams.scheduler import start_thread
from kvstore.spec import Exactness, MissReason, ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import spec_from_message, spec_to_message
from kvstore.wire.bounds import decode
from kvstore_client.fetching import AnyPrefix, LayerStream, Wanted, open_prefix
from kvstore_client.prefix import AnySession
from kvstore_client.prompt import EXACTNESSES
from kvstore_client.writer import COMMIT_S_MAX

_log = logging.getLogger("kvstore.client")


def pack_ticket(ticket: bytes, spec: ModelSpec, digests: list[bytes], exactness: int, token_count: int) -> bytes:
    """What another process needs to fetch by this ticket, as one run of bytes."""
    return pb.HeldPrefix(
        ticket=ticket, spec=spec_to_message(spec), digests=b"".join(digests), token_count=token_count,
        exactness=exactness,  # type: ignore[arg-type]  # the wire's number
    ).SerializeToString()  # fmt: skip


def cut(digests: bytes) -> list[bytes]:
    """Digests that travelled as one run."""
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


class Held:
    """A ticket, read: of a match with hold=True, or of a writer (``is_store``), which has the same fields and more.
    Raises InvalidRequest when the bytes are none."""

    def __init__(self, ticket: bytes) -> None:
        try:
            message = decode(pb.HeldPrefix, ticket)
        except Exception as error:
            raise InvalidRequest("ticket must be the bytes that a match with hold=True carries") from error
        if not message.ticket or not message.token_count or len(message.digests) % DIGEST_BYTES:
            raise InvalidRequest("ticket must be the bytes that a match with hold=True carries")
        self.ticket = message.ticket
        self.spec = spec_from_message(message.spec)
        self.digests = cut(message.digests)
        self.exactness = int(message.exactness)
        if self.exactness not in EXACTNESSES:
            raise InvalidRequest("ticket must be the bytes that a match with hold=True carries")
        self.is_store = pb.SharedStore.FromString(ticket).shards > 0
        self.token_count = int(message.token_count)


def open_held(session: AnySession, wanted: Wanted, name: bytes, held: Held, timeout_s: float) -> AnyPrefix:
    """What a ticket holds. A store that was committed meanwhile is fetched like any other."""
    if held.is_store:
        try:
            return open_prefix(session, wanted, name, held.digests, held.exactness, COMMIT_S_MAX, held.ticket)
        except InvalidRequest:
            return open_prefix(session, wanted, name, held.digests, held.exactness, timeout_s)
    return open_prefix(session, wanted, name, held.digests, held.exactness, timeout_s, held.ticket)


def without_frames(error: BaseException) -> None:
    """Take from an error, and from what it came from, the frames they passed: these hold a whole cache, and where the
    error is part of what they hold only garbage collection would end both."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


class Transfer:
    """A fetch on its way. Its destination belongs to it until ``is_done``. One that is dropped is cancelled.

    ``token_count``: how many tokens come, 0 for a miss; ``reason``: why no more, where it was asked for by its tokens.
    ``exactness``: what it may be stored as.
    """

    def __init__(
        self, token_count: int, layers: Iterable[int], hidden_layers: Iterable[int] = (),
        reason: MissReason = MissReason.NONE, exactness: Exactness = Exactness.EXACT,
    ) -> None:  # fmt: skip
        self.exactness = exactness
        self.token_count = token_count
        self.reason = reason
        self._bringing = Bringing(token_count, layers, hidden_layers)
        self._thread: threading.Thread | None = None

    def start(self, open_stream: Callable[[], LayerStream]) -> None:
        """Bring the layers in order, on a thread of its own. Raises Unavailable where none can be had."""
        self._thread = start_thread(partial(self._bringing.run, open_stream), "kvstore-transfer")

    @property
    def layers(self) -> list[int]:
        """Those it brings, in order."""
        return list(self._bringing.layers)

    @property
    def error(self) -> KVStoreError | None:
        """Why it ended before its last layer, or None."""
        return self._bringing.error

    @property
    def good_token_count(self) -> int:
        """Leading tokens whose layers so far are good; below ``token_count`` only when chunks were lost on the way."""
        return self._bringing.good_token_count

    def brings(self, layer: int) -> bool:
        """Whether a layer is part of it."""
        return layer in self._bringing.layers

    def wait_layer(self, layer: int, timeout: float | None = None) -> Any:
        """Return when the layer is in its place: (K, V), or E where the spec keeps that; None for a miss. Raises what
        ended the transfer; DeadlineExceeded after ``timeout`` seconds; InvalidRequest for a layer it does not bring."""
        return _landed(self.landing(layer), f"layer {layer}", timeout)

    def landing(self, layer: int) -> Future[Any]:
        """What is done when the layer is in its place, or will not come. Raises InvalidRequest."""
        return _part(self._bringing.layers, layer, f"layer {layer}")

    def wait_hidden(self, layer: int, timeout: float | None = None) -> Any:
        """Return when E of a hidden layer has come: it, [token_count, hidden_size]; None for a miss. Raises like
        ``wait_layer``."""
        return _landed(self.landing_hidden(layer), f"E of layer {layer}", timeout)

    def landing_hidden(self, layer: int) -> Future[Any]:
        """As ``landing``, of E."""
        return _part(self._bringing.hidden, layer, f"E of layer {layer}")

    def wait(self, timeout: float | None = None) -> None:
        """Return when every layer is in its place. Raises like ``wait_layer``."""
        _landed(self.ending, "the transfer", timeout)
        if self.error is not None:
            raise _again(self.error)

    @property
    def ending(self) -> Future[Any]:
        """What is done when the transfer is."""
        return self._bringing.ended

    def poll(self) -> int:
        """How many leading layers are in their place."""
        futures = list(self._bringing.layers.values())
        landed = (number for number, each in enumerate(futures) if not each.done() or each.exception() is not None)
        return next(landed, len(futures))

    @property
    def is_done(self) -> bool:
        """Whether nothing writes to the destination any more."""
        return self._bringing.ended.done()

    @property
    def failed(self) -> bool:
        return self.error is not None

    def stop(self) -> None:
        """Let it end soon, and wait for nothing."""
        self._bringing.is_cancelled = True
        stream = self._bringing.stream
        if stream is not None:
            stream.cancel()

    def cancel(self, timeout: float | None = None) -> bool:
        """Stop it. True once nothing writes to the destination any more, or holds it on its behalf; waits for that at
        most ``timeout`` s."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)  # what it holds goes with it
        return self.is_done

    def __del__(self) -> None:
        self._bringing.is_cancelled = True
        stream = self._bringing.stream
        if stream is not None:
            stream.abandon()


class Bringing:
    """What a transfer's thread does and knows. It does not know the transfer: who drops that ends this."""

    def __init__(self, token_count: int, layers: Iterable[int], hidden_layers: Iterable[int]) -> None:
        self.token_count = token_count
        self.good_token_count = 0
        self.error: KVStoreError | None = None
        self.layers: dict[int, Future[Any]] = {layer: Future() for layer in layers}
        self.hidden: dict[int, Future[Any]] = {layer: Future() for layer in hidden_layers}
        self.ended: Future[None] = Future()
        self.is_cancelled = False
        self.stream: LayerStream | None = None

    def run(self, open_stream: Callable[[], LayerStream]) -> None:
        """Bring what the stream has."""
        try:
            stream = open_stream()
            if stream.token_count < self.token_count:
                stream.close()
                raise DataLoss(f"a chunk of this ticket was lost: {stream.reason.name}", reason=stream.reason.name)
            self._bring(stream)
        except KVStoreError as error:
            without_frames(error)  # a cancelled call is its own error, and its frames hold the call
            self._fail(Unavailable("the transfer was cancelled") if self.is_cancelled else error)
        except Exception as error:  # noqa: BLE001 - the boundary: a thread of ours must not die in silence
            _log.exception("a transfer failed")
            without_frames(error)
            self._fail(Internal(f"the transfer failed: {error!r}"))
        finally:
            self.ended.set_result(None)

    def _bring(self, stream: LayerStream) -> None:
        self.stream = stream
        layers = iter(stream)
        try:
            if self.is_cancelled:
                raise Unavailable("the transfer was cancelled")
            for layer, entry in layers:
                self.good_token_count = self.token_count
                self.layers[layer].set_result(entry)
                if self.is_cancelled:
                    raise Unavailable("the transfer was cancelled")
            for layer, future in self.hidden.items():
                future.set_result(stream.hidden.get(layer))
            for future in self.layers.values():
                if not future.done():
                    future.set_result(None)  # a miss brings nothing
        except DataLoss:
            self.good_token_count = stream.good_token_count
            raise
        finally:
            layers.close()  # type: ignore[attr-defined]  # a generator's iterator
            stream.close()

    def _fail(self, error: KVStoreError) -> None:
        self.error = error
        for future in (*self.layers.values(), *self.hidden.values()):
            if not future.done():
                future.set_exception(error)


def _part(futures: Mapping[int, Future[Any]], layer: int, name: str) -> Future[Any]:
    if layer not in futures:
        raise InvalidRequest(f"{name} is not part of this transfer")
    return futures[layer]


def _landed(future: Future[Any], name: str, timeout: float | None) -> Any:
    try:
        error = future.exception(timeout)
    except TimeoutError:
        raise DeadlineExceeded(f"{name} did not land within {timeout} s") from None
    if isinstance(error, KVStoreError):
        raise _again(error)
    return future.result()


def _again(error: KVStoreError) -> KVStoreError:
    """What ended a transfer, anew for each who waits: one that was raised has the frames it passed, which hold the
    transfer, and that holds its error."""
    again = type(error)(error.message, **error.fields)
    again.__cause__ = error.__cause__
    return again
