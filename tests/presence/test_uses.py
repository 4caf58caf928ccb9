"""What a client says it did without a call: every byte of it, and the chains before there are too many."""

from __future__ import annotations

from kvstore_client.lookup.presence import INTERVAL_S, ChainName, Presence

from kvstore.handoff.messages import USED_MAX, LookedUp, Question
from kvstore.handoff.packets import PACKET_BYTES_MAX, decode_question, encode
from tests.simulated import ManualClock

NAME = ChainName(bytes(32), 1, 1)


class Told:
    """A hand-off that notes its packets; with ``is_full`` it takes none."""

    def __init__(self) -> None:
        self.packets: list[LookedUp] = []
        self.is_full = False
        self.clock = ManualClock()
        self.presence = Presence(self.send, lambda: True, self.clock)
        self.presence.tell()
        self.packets.clear()

    def send(self, question: Question) -> bool:
        packet = encode(question)
        assert len(packet) < PACKET_BYTES_MAX
        assert decode_question(packet) == question
        if not self.is_full and isinstance(question, LookedUp):
            self.packets.append(question)
        return not self.is_full

    def fetched(self, number: int) -> None:
        self.presence.use(NAME, number.to_bytes(32, "big"), 16)
        self.presence.count(fetch_calls=1, fetch_bytes=10 << 30)

    def told(self) -> list[int]:
        return [int(digest, 16) for packet in self.packets for *_, digest in packet.used]


def test_a_fast_machines_bytes_are_all_told() -> None:
    told = Told()
    told.fetched(1)
    told.presence.tell()
    assert [packet.fetch_bytes for packet in told.packets] == [10 << 30]


def test_chains_are_told_before_there_are_too_many() -> None:
    told = Told()
    for number in range(5 * USED_MAX):
        told.fetched(number)
    assert told.told() == list(range(5 * USED_MAX))


def test_of_what_could_not_be_told_the_last_ones_are_kept() -> None:
    told = Told()
    told.is_full = True
    for number in range(2 * USED_MAX):
        told.fetched(number)
    told.is_full = False
    told.presence.tell()
    assert told.told() == list(range(USED_MAX, 2 * USED_MAX))


def test_fetches_and_tokens_of_a_chain_are_told_together() -> None:
    told = Told()
    for _ in range(3):
        told.fetched(7)
    told.fetched(8)
    told.presence.tell()
    assert [(packet.used_amounts, len(packet.used)) for packet in told.packets] == [(((3, 48), (1, 16)), 2)]


def test_few_uses_wait_for_the_interval() -> None:
    told = Told()
    told.fetched(1)
    assert not told.packets
    told.clock.advance(INTERVAL_S)
    told.fetched(2)
    assert told.told() == [1, 2]


def test_a_signal_handler_may_close_the_client_in_the_midst_of_a_report() -> None:
    """A close tells what was not told."""
    told, interrupts = Told(), [1]

    class Interrupted(bytes):
        def hex(self, *_: object) -> str:
            while interrupts:
                interrupts.pop()
                told.presence.tell()
            return bytes(self).hex()

    told.fetched(1)
    for number in (2, 3):
        told.presence.use(NAME, Interrupted(number.to_bytes(32, "big")), 16)
    told.presence.tell()
    assert told.told()[:3] == [1, 2, 3]
