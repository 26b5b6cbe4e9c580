"""Peer-to-peer transposes of Dask arrays.

>>> import dask_p2p
>>> y = dask_p2p.transpose(x)  # doctest: +SKIP
"""

from dask_p2p.cluster import local_cluster
from dask_p2p.errors import (
    AxesError,
    BlockMismatchError,
    BlockUnavailableError,
    ChunksError,
    ConfigError,
    FileError,
    InputError,
    P2PError,
    P2PWarning,
    TransferError,
    UnsupportedArrayError,
)
from dask_p2p.registration import register
from dask_p2p.transpose import transpose

__all__ = [
    "AxesError",
    "BlockMismatchError",
    "BlockUnavailableError",
    "ChunksError",
    "ConfigError",
    "FileError",
    "InputError",
    "P2PError",
    "P2PWarning",
    "TransferError",
    "UnsupportedArrayError",
    "local_cluster",
    "register",
    "transpose",
]
