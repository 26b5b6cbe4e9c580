"""The transports that there are, and what all that a task may use take of memory together."""

from __future__ import annotations

from functools import lru_cache

from dask_p2p.config import Options, register_transport
from dask_p2p.transports.base import Transport
from dask_p2p.types import Kind

__all__ = ["idle_bytes", "left_bytes", "packed_bytes", "register", "staging_bytes"]

#: All transports, by name.
classes: dict[str, type[Transport]] = {}


def register(*transports: type[Transport]) -> None:
    """Make transports known by their names."""
    for transport in transports:
        classes[transport.name] = transport
        register_transport(transport.name, transport.rank)


def _used(options: Options, kind: Kind) -> list[type[Transport]]:
    """Return the transports that may bring blocks of this kind."""
    known = (classes[name] for name in options.order(kind) if name in classes)
    return [transport for transport in known if kind in transport.kinds]


def left_bytes(options: Options, kind: Kind) -> int:
    """Return what parts of one transport may take, of those that copy them to their reader."""
    beside_bytes = sum(transport.beside_bytes(options, kind) for transport in _used(options, kind))
    return options.staging_limit_bytes - beside_bytes


@lru_cache(maxsize=1024)  # each task of an array asks the same, before it does anything else
def staging_bytes(
    options: Options, kind: Kind, largest_bytes: int, remote_bytes: int, item_bytes: int
) -> int:
    """Return what one task holds at most beyond its inputs and its output.

    A task that reads from some workers in place, and from others by another transport, has slots
    and parts at the same time. So it has parts of this host and of others; but of either it never
    has parts of two transports.

    Parameters
    ----------
    options, kind
        The task's.
    largest_bytes
        Of the largest region that it reads from one block.
    remote_bytes
        All that comes from other workers.
    item_bytes
        Of one element: no part is smaller.
    """
    slots_bytes = 0
    parts_bytes = {True: 0, False: 0}  # by whether they come from this host
    for transport in _used(options, kind):
        held = transport.staging_bytes(options, kind, largest_bytes, remote_bytes, item_bytes)
        if transport.in_place:
            slots_bytes += held
        else:
            near = transport.within_host
            parts_bytes[near] = max(parts_bytes[near], held)
    return slots_bytes + sum(parts_bytes.values())


def packed_bytes(options: Options, kind: Kind, readers: int, remote_bytes: int) -> int:
    """Return what one worker has packed at most, for so many tasks that read from it at a time.

    Parameters
    ----------
    options, kind
        Of the tasks, and of the worker.
    readers
        Tasks that may read from it at a time.
    remote_bytes
        All that they ever read from it.
    """
    packings = [transport.packing(options, kind) for transport in _used(options, kind)]
    task_bytes = max(packing.task_bytes for packing in packings)
    copies = max(packing.copies for packing in packings)
    return min(options.staging_limit_bytes, readers * task_bytes, copies * remote_bytes)


def idle_bytes(options: Options, kind: Kind) -> int:
    """Return what all transports keep in buffers for later at most."""
    return sum(transport.idle_bytes(options, kind) for transport in _used(options, kind))
