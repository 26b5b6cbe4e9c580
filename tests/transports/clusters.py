"""Transposes on clusters, whose transports are looked at."""

import dask.array as da

import dask_p2p
from tests.support import persisted, spread, used


def transposed(client, x, chunks, after=None):
    """Transpose blocks that are on all workers, check the values, and return the transports."""
    y = dask_p2p.transpose(spread(client, da.from_array(x, chunks=chunks)), chunks=after)
    y = persisted(client, y)
    result = y.compute()
    assert result.dtype == x.dtype
    assert result.tobytes() == x.T.tobytes()
    return used(client, y)
