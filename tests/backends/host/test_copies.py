from __future__ import annotations

import threading

import numpy as np
import pytest

from dask_p2p.backends import host as host_copies
from dask_p2p.backends.host import copy_on_host


@pytest.mark.parametrize("shape", [(1, 3000, 100), (700, 431), (400_000,), (3, 5), (), (0, 4)])
def test_arrays_are_copied_by_several_threads_if_they_are_large(monkeypatch, shape):
    monkeypatch.setattr(host_copies, "thread_count", lambda: 3)
    threads, permute_into = set(), host_copies.permute_into

    def noted(*args):
        threads.add(threading.current_thread().name)
        permute_into(*args)

    monkeypatch.setattr(host_copies, "permute_into", noted)
    values = np.random.default_rng(0).random(shape)
    out = np.empty(shape[::-1]).T
    copy_on_host(out, values)
    np.testing.assert_array_equal(out, values)
    caller = {threading.current_thread().name}
    assert threads <= caller if values.nbytes < 2**20 else not threads & caller
