"""Peer-to-peer transposes, rechunks and halo exchanges of Dask arrays.

>>> import dask_p2p
>>> y = dask_p2p.transpose(x)  # doctest: +SKIP

What is here loads with its first use: `dask` itself imports this package at each start, for its
command line.
"""

from typing import TYPE_CHECKING, Any

from dask_p2p.config import ensure_defaults
from dask_p2p.errors import (
    AxesError,
    BlockMismatchError,
    BlockUnavailableError,
    ChunksError,
    ConfigError,
    DeviceLostError,
    FileError,
    InputError,
    MemoryLimitError,
    P2PError,
    P2PWarning,
    RegistrationError,
    SilentError,
    TransferError,
    UnreachableError,
    UnsuitableError,
    UnsupportedArrayError,
    VersionError,
)

if TYPE_CHECKING:
    from dask_p2p.cluster import local_cluster
    from dask_p2p.diagnosis import check
    from dask_p2p.dropin import install, uninstall
    from dask_p2p.monitoring.runs import last_runs
    from dask_p2p.ops.overlap import map_overlap
    from dask_p2p.ops.peak import MemoryEstimate, estimate
    from dask_p2p.ops.rechunk import rechunk
    from dask_p2p.ops.transpose import transpose
    from dask_p2p.registration import register

__all__ = [
    "AxesError",
    "BlockMismatchError",
    "BlockUnavailableError",
    "ChunksError",
    "ConfigError",
    "DeviceLostError",
    "FileError",
    "InputError",
    "MemoryEstimate",
    "MemoryLimitError",
    "P2PError",
    "P2PWarning",
    "RegistrationError",
    "SilentError",
    "TransferError",
    "UnreachableError",
    "UnsuitableError",
    "UnsupportedArrayError",
    "VersionError",
    "check",
    "estimate",
    "install",
    "last_runs",
    "local_cluster",
    "map_overlap",
    "rechunk",
    "register",
    "transpose",
    "uninstall",
]

ensure_defaults()

# Where each function and class is. No module may have the name of a function: importing it would
# hide that.
_FUNCTIONS = {
    "MemoryEstimate": "dask_p2p.ops.peak",
    "check": "dask_p2p.diagnosis",
    "estimate": "dask_p2p.ops.peak",
    "install": "dask_p2p.dropin",
    "last_runs": "dask_p2p.monitoring.runs",
    "local_cluster": "dask_p2p.cluster",
    "map_overlap": "dask_p2p.ops.overlap",
    "rechunk": "dask_p2p.ops.rechunk",
    "register": "dask_p2p.registration",
    "transpose": "dask_p2p.ops.transpose",
    "uninstall": "dask_p2p.dropin",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("dask-p2p")
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = function = getattr(import_module(_FUNCTIONS[name]), name)
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *_FUNCTIONS})
