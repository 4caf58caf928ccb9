"""The operator's calls to one sidecar. A stream without a message for the longest time of a call has failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvstore_client import Client
from kvstore_client.lookup.feed import Feed
from kvstore_client.planes.incoming import Incoming

from kvstore.errors import DeadlineExceeded, InvalidRequest, Unavailable
from kvstore.spec import ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha import admin_pb2
from kvstore_ops.locate import model_named

UNKNOWN_METHOD = "Method not found!"
ENDED = (
    "the sidecar ended, or was stopped, before the command was through: what was done is done, the rest is as it was. "
    "Run it again once the sidecar answers"
)
ANSWER_S_MAX = 20.0
"""Longest wait for a reply, or for the next message of a stream."""


class OtherRelease(InvalidRequest):
    """The sidecar has no such call."""


class Operator:
    """The operator's calls, over a client's session. Every call raises: Unavailable when the sidecar is gone;
    DeadlineExceeded when it is silent for ``ANSWER_S_MAX``; PermissionDenied for a token without the operator's right;
    InvalidRequest for a model, tier or chunk that does not exist."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._session = client.connect_now()

    def model(self, name: str) -> ModelSpec:
        """Return the registered model of that name. Raises InvalidRequest."""
        return model_named(self._client, name)

    def stats(self) -> admin_pb2.StatsResponse:
        """Return the sidecar's statistics. Connects anew when the sidecar was restarted."""
        self._session = self._client.connect_now()
        found: admin_pb2.StatsResponse = self._call("Stats", admin_pb2.StatsRequest())
        return found

    def tiers(self) -> admin_pb2.TiersResponse:
        """Return the report of each tier: its contents, its state and its problems."""
        found: admin_pb2.TiersResponse = self._call("Tiers", admin_pb2.TiersRequest())
        return found

    def plans(self, limit: int) -> list[admin_pb2.PlanEntry]:
        """Return the last partial prefills, the newest first; 0: all that are kept."""
        found: admin_pb2.PlansResponse = self._call("Plans", admin_pb2.PlansRequest(limit=limit))
        return list(found.plans)

    def show(self, digest: str) -> admin_pb2.ShowChunkResponse:
        """Return the chunk whose digest begins with these hexadecimal digits; without parts when there is none."""
        found: admin_pb2.ShowChunkResponse = self._call("ShowChunk", admin_pb2.ShowChunkRequest(digest=digest))
        return found

    def locate(self, query: pb.ChainQuery) -> pb.LocateResponse:
        """Ask which nodes and tiers have a chain."""
        request = pb.LocateRequest(queries=[query])
        found: pb.LocateResponse = self._session.call(self._session.cache.Locate, request, ANSWER_S_MAX)
        return found

    def hottest(self, count: int) -> list[admin_pb2.HotPrefix]:
        """Return the prefixes that were fetched most of late; none from a sidecar of a release without this call."""
        try:
            found: admin_pb2.HottestResponse = self._call("Hottest", admin_pb2.HottestRequest(limit=count))
        except OtherRelease:
            return []
        return list(found.prefixes)

    def reload(self, *, dry_run: bool) -> list[admin_pb2.SettingChange]:
        """Have the sidecar read its settings again. Return the settings that differ from those in effect before."""
        found: admin_pb2.ReloadResponse = self._call("Reload", admin_pb2.ReloadRequest(dry_run=dry_run))
        return list(found.changes)

    def chunks(self, selection: admin_pb2.Selection, limit: int) -> Iterator[admin_pb2.ListChunksResponse]:
        """Yield pages of chunks; the last page has the totals."""
        return self._stream("ListChunks", admin_pb2.ListChunksRequest(selection=selection, limit=limit))

    def totals(self, selection: admin_pb2.Selection) -> list[admin_pb2.ModelTotal]:
        """Return the totals of the selected chunks, by model."""
        return [each for page in self.chunks(selection, 0) for each in page.totals]

    def change(self, request: admin_pb2.ChangeRequest) -> Iterator[admin_pb2.ChangeResponse]:
        """Make a change, and yield its progress; the last message has the outcome of all chunks."""
        return self._stream("Change", request)

    def _call(self, method: str, request: Any) -> Any:
        try:
            return self._session.call(getattr(self._session.admin, method), request, ANSWER_S_MAX)
        except InvalidRequest as error:
            raise _of_another_release(error, method) from error

    def _stream(self, method: str, request: Any) -> Iterator[Any]:
        """Yield the messages of a stream, up to the one that is marked as last."""
        session = self._session
        try:
            call = getattr(session.admin, method)(request, metadata=session.metadata)
        except ValueError as error:
            raise Unavailable("the sidecar is gone: its log says why; kvstore serve starts it again") from error
        feed = Feed(Incoming(call), ENDED)
        try:
            while True:
                try:
                    message: Any = feed.ask().result(ANSWER_S_MAX)
                except InvalidRequest as error:
                    raise _of_another_release(error, method) from error
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"the sidecar said nothing for {ANSWER_S_MAX:.0f} s: see its log, and try again"
                    ) from None
                yield message
                if message.is_last:
                    return
        finally:
            feed.close()


def _of_another_release(error: InvalidRequest, method: str) -> InvalidRequest:
    """Return the error unchanged; or ``OtherRelease`` when gRPC itself reports that the sidecar has no such method."""
    if UNKNOWN_METHOD not in (error.message, getattr(error.__cause__, "message", "")):
        return error
    return OtherRelease(
        f"the sidecar is of another release, which has no {method}: kvstore status says which; install the same here"
    )
