"""Transposes on clusters, whose transports are looked at."""

import dask.array as da

import dask_p2p
from tests.support import assert_same_bits, spread, used


def transposed(client, x, chunks, after=None):
    """Transpose blocks on all workers, to all of them; check the values, return the transports."""
    y = dask_p2p.transpose(spread(client, da.from_array(x, chunks=chunks)), chunks=after)
    y = spread(client, y)
    assert_same_bits(y.compute(), x.T)
    return used(client, y)
