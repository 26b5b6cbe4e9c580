"""Transports: how a region of a remote block comes to this worker.

A new transport is one module with a subclass of `Transport` and one line here.
"""

from __future__ import annotations

from dask_p2p.config import Options
from dask_p2p.transports.base import Host, Transport
from dask_p2p.transports.comm import CommTransport
from dask_p2p.transports.ipc import IpcTransport

__all__ = ["make_transports"]


def make_transports(host: Host, options: Options) -> dict[str, Transport]:
    """Make every transport of a worker, by name."""
    transports: list[Transport] = [IpcTransport(host, options.ipc_retain_s), CommTransport(host)]
    return {transport.name: transport for transport in transports}
