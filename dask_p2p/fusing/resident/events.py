"""Announcements of the ranks of a resident gang to their client: all of them have begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from dask_p2p.fusing.resident.command_queues import TOPIC

if TYPE_CHECKING:
    from dask_p2p.fusing.resident.client_streams import ClientStreams

#: Address, token and memory limit of each rank.
Ranks: TypeAlias = Sequence[tuple[str, str, int]]


#: Streams of a client, by the name of the gang.
_Streams: TypeAlias = "WeakValueDictionary[str, ClientStreams]"
_streams: WeakKeyDictionary[Any, _Streams] = WeakKeyDictionary()  # by client


def receive(client: Any, gang: str, streams: ClientStreams) -> None:
    """Record the ranks of a gang in its streams when all of them have begun."""
    known = _streams.setdefault(client, WeakValueDictionary())
    for name in [name for name, each in known.items() if each is streams]:
        del known[name]  # the gang before
    known[gang] = streams
    # Once more for each gang: the client may have connected to another scheduler.
    client.subscribe_topic(TOPIC, partial(_pass_on, known))


def workers_of(ranks: Ranks) -> set[str]:
    """Return the addresses of the workers of some ranks."""
    return {address for address, *_ in ranks}


def _pass_on(known: _Streams, event: tuple[float, Mapping[str, Any]]) -> None:
    """Pass an event to the streams of its gang; other clients ignore it."""
    _, message = event
    if (streams := known.get(message["gang"])) is not None:
        streams.record_ranks(message["ranks"], message["resume"])
