"""Announcements of the ranks of a resident gang to their client: all of them have begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from dask_p2p.fusing.resident.command_queues import TOPIC

#: Address, token and memory limit of each rank.
Ranks: TypeAlias = Sequence[tuple[str, str, int]]


class Receiver(Protocol):
    """Receives the ranks of a gang."""

    def record_ranks(self, ranks: Ranks, resume: int) -> None:
        """Record the ranks of an attempt, which have the handles of a checkpoint."""


#: Receivers of a client, by the name of the gang.
_Receivers: TypeAlias = "WeakValueDictionary[str, Receiver]"
_receivers: WeakKeyDictionary[Any, _Receivers] = WeakKeyDictionary()  # by client


def receive(client: Any, gang: str, receiver: Receiver) -> None:
    """Call a receiver on the event loop when all ranks of a gang have begun."""
    receivers = _receivers.setdefault(client, WeakValueDictionary())
    for name in [name for name, each in receivers.items() if each is receiver]:
        del receivers[name]  # the gang before
    receivers[gang] = receiver
    # Once more for each gang: the client may have connected to another scheduler.
    client.subscribe_topic(TOPIC, partial(_pass_on, receivers))


def workers_of(ranks: Ranks) -> set[str]:
    """Return the addresses of the workers of some ranks."""
    return {address for address, *_ in ranks}


def _pass_on(receivers: _Receivers, event: tuple[float, Mapping[str, Any]]) -> None:
    """Pass an event to the receiver of its gang; other clients ignore it."""
    _, message = event
    if (receiver := receivers.get(message["gang"])) is not None:
        receiver.record_ranks(message["ranks"], message["resume"])
