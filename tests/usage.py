"""What transports hold for others, or of others: all zero when nobody reads or is read."""

from dask_p2p.transports.in_place import IpcTransport
from dask_p2p.transports.packed import PackedTransport
from dask_p2p.transports.pinned import PinnedTransport
from dask_p2p.transports.same_host import SameHostTransport
from dask_p2p.transports.ucx import UcxTransport


def usage(transport):
    """Count what one transport holds, by what it is."""
    counts = {}
    if isinstance(transport, SameHostTransport):
        counts["published"] = len(transport.directory)
    if isinstance(transport, PackedTransport):
        counts["opened"] = len(transport.opened)
        counts["requested"] = sum(len(reading.calls) for reading in list(transport.opened))
    if isinstance(transport, IpcTransport):
        counts["mapped"] = len(transport.mappings)
    if isinstance(transport, PinnedTransport):
        counts["mapped"] = len(transport.mapped)
    if isinstance(transport, UcxTransport):
        messenger = transport._messenger
        counts["messages"] = 0 if messenger is None else messenger.in_flight
    return counts


def usage_of_worker(context):
    """Count what a worker's transfers hold, by transport and kind.

    Everything is zero when no task runs, and all that readers asked for is sent, except for what is
    kept a while on purpose: mappings of `ipc`, published blocks, blocks read from disk.
    """
    counts = {"from disk": len(context.from_disk)}
    for name, transport in context.router.transports.items():
        counts |= {f"{name}.{resource}": count for resource, count in usage(transport).items()}
    return counts
