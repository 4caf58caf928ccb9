"""Fetches layer by layer: a layer is handed out while later ones are still being copied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future

from kvstore.errors import DataLoss, Unavailable
from kvstore.spec import Tier
from kvstore_client.arrays import Layer, Tensor
from kvstore_client.context import Context
from kvstore_client.copying import wait_all
from kvstore_client.fetch.fetched import after, before
from kvstore_client.planes.prefix import Landing, Prefix, Target

OF_THE_PARENT = "this fetch is of the process that this one is a fork of: begin one here"


class LayerStream:
    """Yields (layer, (K, V)), or (layer, E) where a spec keeps E, in order while later layers are still being copied.

    ``token_count`` is known before the first layer; 0 is a miss, and nothing is yielded. Raises: DataLoss when a chunk
    was lost under the copy, DeadlineExceeded when a copy hangs: discard what came, recompute. Unavailable in a forked
    child: it has neither the memory nor the threads of a fetch that its parent began.

    ``hidden``: E of the requested hidden layers, [token_count, hidden_size], once the iteration has ended.
    ``exactness``: the exactness to store it with.
    ``began_s``: when the first layer was asked for; ``landed_s``: when the last layer landed.
    ``good_token_count``: the part of ``token_count`` that is left when chunks were lost.
    """

    def __init__(self, prefix: Prefix, target: Target | None, context: Context) -> None:
        """``target`` None: a miss."""
        self._pid = os.getpid()
        self._prefix = prefix
        self._target = target
        self._context = context
        self.reason = prefix.reason
        self.hidden: dict[int, Tensor] = {}
        self.began_s = self.landed_s = 0.0
        self.token_count = self.good_token_count = prefix.token_count
        self.exactness = prefix.exactness
        self.tier = prefix.tier if self.token_count else Tier.NONE
        self.byte_count = prefix.wanted.byte_count(self.token_count)

    def __iter__(self) -> Iterator[tuple[int, Layer]]:
        prefix, target, context = self._prefix, self._target, self._context
        if target is None:
            self.close()
            return
        self._check_process()
        self.began_s = context.clock.monotonic()
        layers = prefix.wanted.layers
        bad: set[int] = set()
        began = before(prefix, target)
        # Begin all copies of resident chunks now: holding copies back gains nothing, and two threads bound them.
        landing = prefix.landing(target, context.copier, context.faults, bad, self._landed)
        try:
            checked: set[Future[None]] = set()
            for position, layer in enumerate(layers):
                self._check_process()
                # One check is enough for layers that were copied together, if nothing of them was still to come.
                copies = landing.layers[position]
                if not position or not landing.has_landed(position) or not checked.issuperset(copies):
                    self._await_layer(landing, position, bad)
                    checked.update(copies)
                yield layer, target.layer(position, self.token_count)
            self._await_hidden(target, landing, bad)
            self._await_commit(landing, bad)
            after(prefix, target, self.token_count, began)
        finally:
            if self._pid == os.getpid():  # none of its copies ends in a forked child
                landing.stop(self._context.timeout_s)
            self.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise Unavailable(OF_THE_PARENT)

    def _await_layer(self, landing: Landing, position: int, bad: set[int]) -> None:
        while not landing.has_landed(position) and landing.advance():
            pass  # until ``advance`` says that no more will come
        wait_all(landing.layers[position], self._context.timeout_s)
        layer = self._prefix.wanted.layers[position]
        self._settle(bad, f"a chunk was lost while layer {layer} was copied", layer=layer)

    def _await_hidden(self, target: Target, landing: Landing, bad: set[int]) -> None:
        layers = self._prefix.wanted.hidden_layers
        if not layers:
            return
        while landing.is_waiting and landing.advance():
            pass  # until ``advance`` says that no more will come
        landing.finish(self._context.timeout_s)
        self._settle(bad, "a chunk was lost while hidden states were copied")
        self.hidden = {layer: target.rows(layer, self.token_count) for layer in layers}

    def _await_commit(self, landing: Landing, bad: set[int]) -> None:
        """Wait for the commit of a store in flight: its layers count only then."""
        if not self._prefix.is_provisional:
            return
        while self._prefix.is_provisional and landing.advance():
            pass  # until ``advance`` says that no more will come
        self._settle(bad, "a store was not committed that this fetch had joined: discard what came")

    def _settle(self, bad: set[int], reason: str, **fields: object) -> None:
        """Raise DataLoss, with the ``reason``, when chunks were lost under the copy."""
        self.good_token_count = self._prefix.settle(bad)
        if self.good_token_count < self.token_count:
            raise DataLoss(reason, **fields)

    def _landed(self) -> None:
        self.landed_s = self._context.clock.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds since the first layer was asked for."""
        return self._context.clock.monotonic() - self.began_s

    def cancel(self) -> None:
        """From another thread: stop waiting for layers that have not landed. The iteration ends soon, as after a
        loss."""
        self._prefix.cancel()

    def abandon(self) -> None:
        """Cancel from a destructor: another thread makes the call that this takes."""
        self._prefix.abandon()

    def close(self) -> None:
        """Give the lease back. The end of the iteration does so, too."""
        self._prefix.close()
