"""Transports: the ways to move a region of a remote block to this worker.

A new transport is a module with a subclass of `Transport`, and one line here. In another package,
an entry point of the group ``dask_p2p.transports`` takes the place of that line.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from dask_p2p.config import Options, transport_classes, transport_finders
from dask_p2p.errors import ConfigError
from dask_p2p.transports.base import Transport, WorkerContext
from dask_p2p.transports.buffers import ByteBudget
from dask_p2p.transports.in_place import CmaTransport, IpcTransport
from dask_p2p.transports.packed import CommTransport
from dask_p2p.transports.pinned import PinnedTransport
from dask_p2p.transports.ucx import UcxTransport

#: The transports of this package, best first. The last resort works between any two workers.
OWN: Any = (IpcTransport, CmaTransport, UcxTransport, PinnedTransport, CommTransport)


def all_transports() -> dict[str, type[Transport]]:
    """Return the classes of all transports by name, best first. Other packages' classes come first.

    Raises `ConfigError` if an entry point names no transport.
    """
    foreign_classes = []
    for entry_point in entry_points(group="dask_p2p.transports"):
        try:
            transport: type[Transport] = entry_point.load()
            if not issubclass(transport, Transport):
                raise TypeError(f"expected a subclass of Transport, got {transport}")
        except Exception as exc:  # importing another package may raise any error
            raise ConfigError(
                f"the entry point {entry_point.name} of dask_p2p.transports, {entry_point.value}, "
                f"is no transport: {type(exc).__name__}: {exc}. Repair or uninstall its package"
            ) from exc
        foreign_classes.append(transport)
    return {transport.name: transport for transport in (*foreign_classes, *OWN)}


transport_finders.append(all_transports)


def make_transports(worker: WorkerContext, options: Options) -> dict[str, Transport]:
    """Return new transports for a worker, by name."""
    transports = {name: make(worker, options) for name, make in transport_classes().items()}
    packed = ByteBudget(options.staging_limit_bytes)
    for transport in transports.values():
        transport.packed = packed
    return transports
