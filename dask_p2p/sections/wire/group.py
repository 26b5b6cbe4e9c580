"""The connections of some ranks of a section, with ranks of their own from 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dask_p2p.sections.wire.connection import Buffer
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.sections.wire.messages.format import SentMessage
from dask_p2p.sections.wire.messages.mailbox import Receive
from dask_p2p.types import Array


class GroupConnections(Connections):
    """Connections to a group of ranks, which are those of all ranks."""

    def __init__(
        self,
        connections: Connections,  # of all ranks, or of the group that this one is a part of
        ranks: Sequence[int],  # the group's ranks there, in order
        name: str,  # of the group, the same on its ranks
    ) -> None:
        self._whole, self._ranks, self._name = connections, [*ranks], name
        own, _ = connections.rank_and_size
        self._rank = self._ranks.index(own)

    @property
    def is_alone(self) -> bool:  # type: ignore[override]
        """True if the group has one rank."""
        return len(self._ranks) == 1

    @property
    def rank_and_size(self) -> tuple[int, int]:
        return self._rank, len(self._ranks)

    def is_on_other_host(self, rank: int) -> bool:
        return self._whole.is_on_other_host(self._ranks[rank])

    def carries(self, rank: int, size_bytes: int) -> bool:
        return self._whole.carries(self._ranks[rank], size_bytes)

    def count(self, rank: int, size_bytes: int) -> None:
        self._whole.count(self._ranks[rank], size_bytes)

    @property
    def has_ended(self) -> bool:
        return self._whole.has_ended

    def begin(
        self,
        call: str,
        sends: Mapping[int, Buffer],
        receives: Mapping[int, Buffer | None],
        in_background: bool = False,
    ) -> Callable[[], dict[int, memoryview]]:
        ranks = self._ranks
        end = self._whole.begin(
            f"{call} of {self._name}",
            {ranks[rank]: data for rank, data in sends.items()},
            {ranks[rank]: into for rank, into in receives.items()},
            in_background,
        )
        own = {rank: number for number, rank in enumerate(ranks)}
        return lambda: {own[rank]: data for rank, data in end().items()}

    def offer(self, rank: int, arrays: Sequence[Array]) -> bytes | None:
        return self._whole.offer(self._ranks[rank], arrays)

    def send_message(self, rank: int, message: SentMessage) -> None:
        self._whole.send_message(self._ranks[rank], message)

    def send_small(self, rank: int, frame: bytes) -> bool:
        return self._whole.send_small(self._ranks[rank], frame)

    def receive_small(self, rank: int) -> bytes | None:
        return self._whole.receive_small(self._ranks[rank])

    def receive_message(self, rank: int, receive: Receive) -> None:
        self._whole.receive_message(self._ranks[rank], receive)

    def wait_for_sent(self, rank: int, message: SentMessage) -> None:
        self._whole.wait_for_sent(self._ranks[rank], message)

    def wait_for_message(self, rank: int, receive: Receive, call: str) -> None:
        self._whole.wait_for_message(self._ranks[rank], receive, f"{call} of {self._name}")
