"""Fetches that run beside the engine: by ticket, into the engine's own memory, layer by layer."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import NoReturn, TypeVar

from kvstore.errors import DataLoss, DeadlineExceeded, Internal, InvalidRequest, KVStoreError, Unavailable
from kvstore.planning.loading import BusyTime
from kvstore.seams.scheduler import start_thread
from kvstore.spec import Exactness, MissReason, Tier
from kvstore_client.arrays import Layer, Tensor
from kvstore_client.fetch.stream import OF_THE_PARENT, LayerStream
from kvstore_client.forks import in_children
from kvstore_client.tracing import within_trace

Result = TypeVar("Result")
_log = logging.getLogger("kvstore.client")


def without_frames(error: BaseException) -> None:
    """Drop the frames that an error and its causes have passed. The frames hold a whole cache; where the cache also
    holds the error, only garbage collection would free the two."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


class Transfer:
    """A fetch in flight. Its destination belongs to it until ``is_done``. Dropping a transfer cancels it.

    ``token_count``: number of tokens that come, 0 for a miss; ``reason``: why no more, if the prefix was asked for by
    its tokens.
    ``exactness``: the exactness to store it with.
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
        in_children(self._end_in_child)

    def _end_in_child(self) -> None:
        """Fail in a forked child, whose parent goes on: the child has not the thread that brings the layers."""
        if not self._bringing.is_over:
            self._bringing = Bringing(self.token_count, self.layers, list(self._bringing.hidden))
            self._bringing.run(_left_to_the_parent)

    def start(self, open_stream: Callable[[], LayerStream]) -> None:
        """Bring the layers in order, on a thread of its own. Raises Unavailable where no thread can be had."""
        self._thread = start_thread(partial(self._bringing.run, within_trace(open_stream)), "kvstore-transfer")

    @property
    def layers(self) -> list[int]:
        """The layers that it brings, in order."""
        return list(self._bringing.layers)

    @property
    def error(self) -> KVStoreError | None:
        """The error that ended it before its last layer, or None."""
        return self._bringing.error

    @property
    def measured(self) -> BusyTime | None:
        """Bytes and seconds of a transfer from the sidecar's memory that has landed whole; None for others."""
        stream = self._bringing.stream
        if stream is None or stream.tier is not Tier.DRAM or self.failed or self.poll() < len(self.layers):
            return None
        return BusyTime(stream.byte_count, stream.landed_s - stream.began_s)

    @property
    def overdue(self) -> BusyTime | None:
        """Bytes and seconds so far of a transfer from the sidecar's memory that has not ended; None for others."""
        stream = self._bringing.stream
        if stream is None or stream.tier is not Tier.DRAM or self.is_done:
            return None
        return BusyTime(stream.byte_count, stream.waited_s, is_cut=True)

    @property
    def good_token_count(self) -> int:
        """Leading tokens whose layers so far are good; below ``token_count`` only when chunks were lost on the way."""
        return self._bringing.good_token_count

    def brings(self, layer: int) -> bool:
        """Return True when a layer is part of the transfer."""
        return layer in self._bringing.layers

    def wait_layer(self, layer: int, timeout: float | None = None) -> Layer:
        """Return the layer when it is in its place: (K, V), or E where the spec keeps that; None for a miss. Raises the
        error that ended the transfer; DeadlineExceeded after ``timeout`` seconds; InvalidRequest for a layer it does
        not bring."""
        return _landed(self.landing(layer), f"layer {layer}", timeout)

    def landing(self, layer: int) -> Future[Layer]:
        """Return a future that is done when the layer is in its place, or will not come. Raises InvalidRequest."""
        return _part(self._bringing.layers, layer, f"layer {layer}")

    def wait_hidden(self, layer: int, timeout: float | None = None) -> Tensor:
        """Return E of a hidden layer when it has come, [token_count, hidden_size]; None for a miss. Raises like
        ``wait_layer``."""
        return _landed(self.landing_hidden(layer), f"E of layer {layer}", timeout)

    def landing_hidden(self, layer: int) -> Future[Tensor]:
        """Return a future like ``landing``, for E."""
        return _part(self._bringing.hidden, layer, f"E of layer {layer}")

    def wait(self, timeout: float | None = None) -> None:
        """Return when every layer is in its place. Raises like ``wait_layer``."""
        _landed(self.ending, "the transfer", timeout)
        if self.error is not None:
            raise _again(self.error)

    @property
    def ending(self) -> Future[None]:
        """A future that is done when the transfer is."""
        return self._bringing.ended

    def poll(self) -> int:
        """Return the number of leading layers that are in their place."""
        futures = list(self._bringing.layers.values())
        landed = (number for number, each in enumerate(futures) if not each.done() or each.exception() is not None)
        return next(landed, len(futures))

    @property
    def is_done(self) -> bool:
        """True when nothing writes to the destination any more."""
        return self._bringing.ended.done()

    @property
    def is_quiet(self) -> bool:
        """True when nothing writes to the destination any more, nor will: it is done, or it was stopped before the
        sidecar had said what there is."""
        bringing = self._bringing
        return self.is_done or (bringing.is_cancelled and bringing.stream is None)  # in this order: see ``_bring``

    @property
    def failed(self) -> bool:
        return self.error is not None

    def stop(self) -> None:
        """Ask the transfer to end soon; wait for nothing. Layers of which the sidecar has said nothing yet fail now:
        nobody waits for a sidecar that stands still."""
        self._bringing.stop()

    def cancel(self, timeout: float | None = None) -> bool:
        """Stop the transfer, and wait for its end for at most ``timeout`` s. Returns True once nothing writes to the
        destination any more, or holds memory for it."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)  # the thread's references go with it
        return self.is_done

    def __del__(self) -> None:
        bringing = vars(self).get("_bringing")
        if bringing is None:  # an interrupt came while it was made
            return
        bringing.is_cancelled = True
        stream = bringing.stream
        if stream is not None:
            stream.abandon()


class Bringing:
    """The state and work of a transfer's thread. It has no reference to the transfer, so that dropping the transfer can
    end it."""

    def __init__(self, token_count: int, layers: Iterable[int], hidden_layers: Iterable[int]) -> None:
        self.token_count = token_count
        self.good_token_count = 0
        self.error: KVStoreError | None = None
        self._to_come = Counter(layers)
        """Per layer, the places that it has yet to come to: a fetch may name a layer twice."""
        self.layers: dict[int, Future[Layer]] = {layer: Future() for layer in self._to_come}
        self.hidden: dict[int, Future[Tensor]] = {layer: Future() for layer in hidden_layers}
        self.ended: Future[None] = Future()
        self.is_over = False
        """True when the thread that brings the layers holds no lock of these futures any more."""
        self.is_cancelled = False
        self.stream: LayerStream | None = None

    def run(self, open_stream: Callable[[], LayerStream]) -> None:
        """Bring the layers of the stream."""
        try:
            stream = open_stream()
            if stream.token_count < self.token_count:
                stream.close()
                raise DataLoss(f"a chunk of this ticket was lost: {stream.reason.name}", reason=stream.reason.name)
            self._bring(stream)
        except KVStoreError as error:
            without_frames(error)  # a cancelled gRPC call is its own error, and its frames hold the call
            self._fail(Unavailable("the transfer was cancelled") if self.is_cancelled else error)
        except Exception as error:  # noqa: BLE001 - the boundary: a thread of ours must not die in silence
            _log.exception("a transfer failed")
            without_frames(error)
            self._fail(Internal(f"the transfer failed: {error!r}"))
        finally:
            self.ended.set_result(None)
            self.is_over = True

    def stop(self) -> None:
        """See ``Transfer.stop``."""
        self.is_cancelled = True
        stream = self.stream
        if stream is not None:
            stream.cancel()
        elif not self.ended.done():
            self._fail(Unavailable("the transfer was cancelled"))

    def _bring(self, stream: LayerStream) -> None:
        self.stream = stream  # before the look at ``is_cancelled``: who stops it sets that before it looks for a stream
        layers = iter(stream)
        try:
            if self.is_cancelled:
                raise Unavailable("the transfer was cancelled")
            for layer, entry in layers:
                self.good_token_count = self.token_count
                self._to_come[layer] -= 1
                if not self._to_come[layer]:
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
        self.error = self.error or error
        for future in (*self.layers.values(), *self.hidden.values()):
            with suppress(InvalidStateError):  # it is done, or another thread has it fail just now
                future.set_exception(error)


def _left_to_the_parent() -> NoReturn:
    raise Unavailable(OF_THE_PARENT)


def _part(futures: Mapping[int, Future[Result]], layer: int, name: str) -> Future[Result]:
    if layer not in futures:
        raise InvalidRequest(f"{name} is not part of this transfer")
    return futures[layer]


def _landed(future: Future[Result], name: str, timeout: float | None) -> Result:
    try:
        error = future.exception(timeout)
    except TimeoutError:
        raise DeadlineExceeded(f"{name} did not land within {timeout} s") from None
    if isinstance(error, KVStoreError):
        raise _again(error)
    return future.result()


def _again(error: KVStoreError) -> KVStoreError:
    """Return a new copy of the error that ended a transfer, one for each waiter. A raised error keeps the frames it
    passed; these hold the transfer, which holds its error."""
    again = type(error)(error.message, **error.fields)
    again.__cause__ = error.__cause__
    return again
