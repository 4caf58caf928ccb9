"""Runs out of the sidecar: fetched straight into the merged cache, layer by layer, while layers before are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from kvstore_kernels import Rotation, rotate

from kvstore.errors import DataLoss, KVStoreError
from kvstore_client.paged import Paged
from kvstore_client.transfer import Transfer

LAYOUT = "page head slot dim"


class FetchedRun:
    """A source whose bytes land in the merged cache by themselves.

    ``landed``: layers that are there already; ``hidden``: E of its tokens at the transition layer. Every wait is
    bounded by ``timeout_s``.
    """

    def __init__(
        self,
        transfer: Transfer | None,
        timeout_s: float,
        *,
        landed: frozenset[int] = frozenset(),
        hidden: torch.Tensor | None = None,
    ) -> None:
        self._transfer = transfer
        self._timeout_s = timeout_s
        self._landed = landed
        self._hidden = hidden

    def land(self, layer: int, k: torch.Tensor, v: torch.Tensor, turn: Rotation | None) -> None:
        if layer not in self._landed:
            assert self._transfer is not None, "a layer that nobody fetches"
            with _as_lost():
                self._transfer.wait_layer(layer, self._timeout_s)
        if turn is not None:
            rotate(k, turn, out=k)

    def hidden(self) -> torch.Tensor:
        hidden, self._hidden = self._hidden, None  # whoever asked has it: it is as large as the rows it becomes
        if hidden is None:
            raise DataLoss("E of the transition layer was not fetched")
        return hidden

    def finish(self) -> None:
        """Return when all of it has landed and counts. Raises: DataLoss when it did not."""
        if self._transfer is not None:
            with _as_lost():
                self._transfer.wait(self._timeout_s)

    def close(self) -> None:
        """Stop what is still on its way. Idempotent."""
        if self._transfer is not None:
            self._transfer.cancel(self._timeout_s)


@contextmanager
def _as_lost() -> Iterator[None]:
    """Whatever ended a transfer, to the caller its bytes are lost: also a ticket that a restarted sidecar forgot."""
    try:
        yield
    except KVStoreError as error:
        raise DataLoss(error.message, **error.fields) from error


def places(
    planes: list[tuple[torch.Tensor, torch.Tensor]], layers: tuple[int, ...], token_start: int
) -> list[tuple[Any, Any]] | Paged:
    """Where a fetch of a prompt's beginning puts these layers, so that tokens before ``token_start`` are left alone."""
    chosen = [planes[layer] for layer in layers]
    if not token_start:
        return list(chosen)
    count = chosen[0][0].shape[1] if chosen else 0
    slots = torch.arange(count)
    slots[:token_start] = -1
    return Paged([(k[None], v[None]) for k, v in chosen], slots, LAYOUT)
