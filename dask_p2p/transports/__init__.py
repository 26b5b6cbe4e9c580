"""Transports: how a region of a remote block comes to this worker.

A new transport is one module with a subclass of `Transport` and one line here.
"""

from __future__ import annotations

from dask_p2p.config import Options
from dask_p2p.transports.base import Transport
from dask_p2p.transports.budget import ByteBudget
from dask_p2p.transports.cma import CmaTransport
from dask_p2p.transports.comm import CommTransport
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.ipc import IpcTransport
from dask_p2p.transports.pinned import PinnedTransport
from dask_p2p.transports.registry import classes, register
from dask_p2p.transports.ucx import UcxTransport

__all__ = ["make_transports"]

register(
    IpcTransport,
    CmaTransport,
    UcxTransport,
    PinnedTransport,
    CommTransport,
)


def make_transports(host: WorkerContext, options: Options) -> dict[str, Transport]:
    """Make every transport of a worker, by name."""
    transports = {name: transport(host, options) for name, transport in classes.items()}
    packed = ByteBudget(options.staging_limit_bytes)
    for transport in transports.values():
        transport.packed = packed
    return transports
