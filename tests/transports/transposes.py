"""What clusters make of transposes, whatever brings the blocks."""

from __future__ import annotations

import warnings

import dask.array as da
import numpy as np

import dask_p2p
from tests.support import persisted, spread, used


def check_bits(client, dtype, transport):
    """A block of any dtype comes bit for bit."""
    x = np.zeros((300, 200), dtype)
    x.view("u1")[...] = np.random.default_rng(0).integers(0, 2, x.view("u1").shape)
    a = spread(client, da.from_array(x, chunks=(70, 150)))
    y = persisted(client, dask_p2p.transpose(a))
    got = y.compute()
    assert got.dtype == x.dtype
    assert got.tobytes() == x.T.tobytes()
    assert used(client, y) == {transport}


def check_objects(client):
    """Objects go another way than by the transport that is preferred, without a warning."""
    x = np.array([[1, "two"], [None, (4,)]] * 8, dtype=object)
    a = spread(client, da.from_array(x, chunks=(4, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = persisted(client, dask_p2p.transpose(a))
    assert y.compute().tolist() == x.T.tolist()
    assert used(client, y) == {"comm"}
