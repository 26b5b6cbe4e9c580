"""Transports: how a region of a remote block comes to this worker.

A new transport is one module with a subclass of `Transport` and one line here.
"""

from __future__ import annotations

from dask_p2p.config import Options
from dask_p2p.transports.base import Host, Transport
from dask_p2p.transports.budget import Budget
from dask_p2p.transports.cma import CmaTransport
from dask_p2p.transports.comm import CommTransport
from dask_p2p.transports.ipc import IpcTransport
from dask_p2p.transports.pinned import PinnedTransport
from dask_p2p.transports.ucx import UcxTransport

__all__ = ["make_transports"]

_CLASSES = (IpcTransport, CmaTransport, UcxTransport, PinnedTransport, CommTransport)


def make_transports(host: Host, options: Options) -> dict[str, Transport]:
    """Make every transport of a worker, by name."""
    made: dict[str, Transport] = {
        transport.name: transport(host, options) for transport in _CLASSES
    }
    packed = Budget(options.staging_limit_bytes)
    for transport in made.values():
        transport.packed = packed
    return made
