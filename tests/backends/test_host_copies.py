from __future__ import annotations

import threading

import numpy as np
import pytest

from dask_p2p.backends import host_copies
from dask_p2p.backends.host_copies import copy_on_host
from dask_p2p.backends.numpy import NUMPY


@pytest.mark.parametrize("shape", [(1, 3000, 100), (700, 431), (400_000,), (3, 5), (), (0, 4)])
def test_arrays_are_copied_by_several_threads_if_they_are_large(monkeypatch, shape):
    monkeypatch.setattr(host_copies, "_cores", lambda: 3)
    host_copies._threads.cache_clear()
    threads, permute_into = set(), NUMPY.permute_into

    def noted(*args):
        threads.add(threading.current_thread().name)
        permute_into(*args)

    monkeypatch.setattr(NUMPY, "permute_into", noted)
    values = np.random.default_rng(0).random(shape)
    out = np.empty(shape[::-1]).T
    copy_on_host(out, values)
    np.testing.assert_array_equal(out, values)
    own = {threading.current_thread().name}
    assert threads <= own if values.nbytes < 2**20 else not threads & own
    host_copies._threads().shutdown()
    host_copies._threads.cache_clear()
