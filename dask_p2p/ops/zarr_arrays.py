"""Options of the Zarr arrays that this package creates."""

from __future__ import annotations

from collections.abc import Iterable

from dask_p2p.types import DType

#: Configuration of arrays: Zarr takes -0j for the fill value 0j, and would omit such chunks.
CONFIG = {"write_empty_chunks": True}


def zarr_format(dtypes: Iterable[DType]) -> int:
    """Return the version of Zarr's format that holds all these dtypes.

    The specification of version 3 has neither big-endian dtypes nor kinds other than numbers.
    """
    return 3 if all(dtype.kind in "biufc" and dtype.isnative for dtype in dtypes) else 2
