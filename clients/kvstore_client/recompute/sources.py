"""Runs from the sidecar: fetched straight into the merged cache, layer by layer, while earlier layers are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from kvstore_kernels import Rotation, rotate

from kvstore.errors import DataLoss, KVStoreError
from kvstore_client.arrays import Tensor
from kvstore_client.fetch.paged import Paged
from kvstore_client.fetch.transfer import Transfer
from kvstore_client.recompute.projecting import project_into, projector_of
from kvstore_client.recompute.rows import step_rows
from kvstore_client.recompute.runner import ModelRunner

LAYOUT = "page head slot dim"


@dataclass(frozen=True)
class Ahead:
    """E of the transition layer on its way, ``rows`` of it the run's; and layers that come with it, in the transfer's
    own memory."""

    transfer: Transfer
    hidden_layer: int
    rows: slice


class FetchedRun:
    """A source whose transfer writes straight into the merged cache; E comes ``ahead``. Every wait is bounded by
    ``timeout_s``."""

    def __init__(self, timeout_s: float, device: torch.device, ahead: Ahead | None = None) -> None:
        self._timeout_s = timeout_s
        self._device = device
        self._ahead = ahead
        self._transfers = [] if ahead is None else [ahead.transfer]

    def follow(self, transfer: Transfer) -> None:
        """Take the other layers from this transfer."""
        self._transfers.append(transfer)

    @property
    def transfers(self) -> list[Transfer]:
        """The transfers that bring it. Any thread may ask."""
        return list(self._transfers)

    def land(self, layer: int, k: torch.Tensor, v: torch.Tensor, turn: Rotation | None) -> None:
        transfer = self._bringing(layer)
        with _as_lost():
            come = transfer.wait_layer(layer, self._timeout_s)
        if self._ahead is not None and transfer is self._ahead.transfer:
            k.copy_(come[0][:, self._ahead.rows])
            v.copy_(come[1][:, self._ahead.rows])
        if turn is not None:
            rotate(k, turn, out=k)

    def comes(self, layer: int, wait_s: float) -> bool:
        """Return True when a layer has come, or has failed, within ``wait_s`` seconds."""
        return self.has_come(layer) or bool(wait((self._bringing(layer).landing(layer),), wait_s).done)

    def has_come(self, layer: int) -> bool:
        """Return True when a layer has come, or has failed."""
        return self._bringing(layer).landing(layer).done()

    def _bringing(self, layer: int) -> Transfer:
        transfer = next((each for each in self._transfers if each.brings(layer)), None)
        assert transfer is not None, "a layer that nobody fetches"
        return transfer

    def hidden(self) -> torch.Tensor:
        ahead, self._ahead = self._ahead, None  # the caller keeps E, not this run: it is large
        if ahead is None:
            raise DataLoss("E of the transition layer was not fetched")
        with _as_lost():
            come: torch.Tensor = ahead.transfer.wait_hidden(ahead.hidden_layer, self._timeout_s)
            ahead.transfer.wait(self._timeout_s)
        self._transfers.remove(ahead.transfer)
        return come[ahead.rows].to(self._device)


class ProjectedRun(FetchedRun):
    """A source of a spec that keeps E. ``rows``: the run's part of the fetched E; its first token has the position
    ``token_start``. K and V are projected from E, in the steps of a prefill, into their place."""

    def __init__(
        self, timeout_s: float, runner: ModelRunner, rows: slice, token_start: int, hidden_layer: int
    ) -> None:  # fmt: skip
        super().__init__(timeout_s, runner.device)
        self._projector, self._step = projector_of(runner), step_rows(runner.device)
        self._rows = rows
        self._token_start = token_start
        self._hidden_layer = hidden_layer

    def land(self, layer: int, k: torch.Tensor, v: torch.Tensor, turn: Rotation | None) -> None:
        project_into(self._projector, layer, self._come(layer), (k, v), self._step, self._token_start)

    def hidden(self) -> torch.Tensor:
        return self._come(self._hidden_layer).to(self._device)

    def _come(self, layer: int) -> torch.Tensor:
        with _as_lost():
            come: torch.Tensor = self._transfers[0].wait_layer(layer, self._timeout_s)
        return come[self._rows]


@contextmanager
def _as_lost() -> Iterator[None]:
    """Turn any error that ended a transfer into DataLoss: also a ticket that a restarted sidecar forgot."""
    try:
        yield
    except KVStoreError as error:
        raise DataLoss(error.message, **error.fields) from error


def places(
    planes: list[tuple[torch.Tensor, torch.Tensor]], layers: tuple[int, ...], wanted: Sequence[range], *, is_last: bool
) -> list[tuple[Tensor, Tensor]] | Paged:
    """Return the target of a fetch of these layers, which leaves tokens that are not ``wanted`` untouched. ``is_last``:
    tokens behind the last wanted one may be written, because nothing else lands there."""
    chosen = [planes[layer] for layer in layers]
    if is_last and len(wanted) == 1 and not wanted[0].start:
        return list(chosen)
    slots = torch.full((chosen[0][0].shape[1] if chosen else 0,), -1)
    for run in wanted:
        slots[run.start : run.stop] = torch.arange(run.start, run.stop)
    return Paged([(k[None], v[None]) for k, v in chosen], slots, LAYOUT)
