from __future__ import annotations

import threading

import numpy as np
import pytest

from dask_p2p.backends import host as host_copies
from dask_p2p.backends.host import copy_on_host, register_from_bytes


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
    own = {threading.current_thread().name}
    assert threads <= own if values.nbytes < 2**20 else not threads & own


def test_no_thread_has_less_to_copy_than_is_worth_it(monkeypatch):
    monkeypatch.setattr(host_copies, "thread_count", lambda: 8)
    sizes, permute_into = [], host_copies.permute_into

    def noted(to, of, axes):
        sizes.append(of.nbytes)
        permute_into(to, of, axes)

    monkeypatch.setattr(host_copies, "permute_into", noted)
    for mebibytes, count in ((1, 1), (4, 1), (16, 4), (64, 8)):
        values = np.zeros(mebibytes * 2**20, "u1")
        copy_on_host(values.copy(), values)
        assert len(sizes) == count
        assert sum(sizes) == values.nbytes
        sizes.clear()


def test_large_blocks_are_pinned_where_few_threads_can_copy(monkeypatch):
    for threads, is_pinned in ((1, True), (3, True), (4, False), (8, False)):
        monkeypatch.setattr(host_copies, "thread_count", lambda threads=threads: threads)
        assert (register_from_bytes() <= 2**24) == is_pinned
        assert register_from_bytes() > 2**24 - 1
