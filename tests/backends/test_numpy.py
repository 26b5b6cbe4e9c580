"""NumPy blocks: their memory."""

from __future__ import annotations

import numpy as np

from dask_p2p.backends.numpy import NUMPY


def test_empty_gives_c_order():
    assert NUMPY.empty([2, 3], ">f4").flags.c_contiguous
    assert NUMPY.empty((), "f4").shape == ()
    assert NUMPY.empty((2, 0), ">f4").dtype == np.dtype(">f4")
