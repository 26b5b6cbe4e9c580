"""Halos between GPUs: values, and the order of all accesses of memory."""

from __future__ import annotations

import gc
from functools import partial
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate
from dask_p2p.plans.ranks import ORDERS
from dask_p2p.sections.gpu import windows
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.transports import cuda_ipc
from tests.sections.emulated import kernel, on_gpu, run_section, with_ucx
from tests.sections.gangs import connections_of
from tests.sections.gpu.stars import CHUNKS, X, check
from tests.support import pairwise


@pytest.mark.parametrize(
    ("beyond", "ranks", "has_windows"),
    pairwise(
        [("periodic", True), ("periodic", False), ("nearest", True), (0.5, False)],
        [1, 2, 6],
        [True, False],
    ),
)
def test_values(gpu, opened, beyond, ranks, has_windows):
    boundary, overlap = beyond
    options = {"overlap": overlap, "device": partial(Gpu, has_windows=has_windows)}
    check(gpu, 5, boundary, ranks=ranks, **options)
    assert len(opened) == (ranks if ranks > 1 else 0)
    assert all(opened) if has_windows and ranks > 1 else not any(opened)


def test_ranks_of_other_hosts_get_messages(gpu, opened, two_hosts):
    """The ranks form a square of four, and each row is on one host."""
    check(gpu, 5)
    assert sorted(opened) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("exchange", ORDERS)
def test_ranks_of_other_hosts_get_messages_by_ucx(gpu, opened, monkeypatch, exchange):
    """Messages from the GPU's memory, without a copy to the host. Small halos go through it."""
    messenger = with_ucx(gpu, monkeypatch)
    check(gpu, 5, exchange=exchange)
    assert sorted(opened) == [[0], [1], [2], [3]]
    assert len(messenger.sent) == 5 * 4
    assert not messenger.waiting


def test_windows_that_one_side_cannot_read_are_not_used(gpu, opened, monkeypatch):
    original = windows.PeerWindow.__init__

    def opens(window, device, *args):
        if connections_of(device).rank_and_size[0] == 0:
            raise cuda_ipc.TransferError("no peer access")
        original(window, device, *args)

    monkeypatch.setattr(windows.PeerWindow, "__init__", opens)
    check(gpu, 5)
    assert sorted(opened) == [[], [1, 2], [1, 3], [2, 3]]


def test_one_way_neighbours_get_messages(gpu, opened):
    """Two slots are not enough if the owner does not wait for the reader."""

    def shifted(u, out):
        out[:] = u[:-1]

    x = np.arange(12.0)
    a = on_gpu(gpu, da.from_array(x, chunks=3))
    y = iterate(kernel(gpu, shifted), a, {0: (1, 0)}, 9, boundary=0.0, ranks=4)
    (result,) = run_section(gpu, y, [x])
    assert result.tolist() == [0] * 9 + [0, 1, 2]
    assert opened == [[]] * 4


# --- several fields in one exchange


def crossed(u, v, out):
    """A stencil of two fields, with other weights at each side."""
    out.u[...] = u[1:-1, 1:-1] + 0.1 * v[:-2, 1:-1] + 0.2 * v[1:-1, 2:]
    out.v[...] = v[1:-1, 1:-1] - 0.3 * u[2:, 1:-1] - 0.4 * u[1:-1, :-2]


@pytest.mark.parametrize("chunks", [CHUNKS, ((3, 4, 5), (10,))], ids=["scattered", "contiguous"])
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"capture": True}], ids=str)
@pytest.mark.parametrize(
    ("ranks", "has_windows"), pairwise([1, 2, 3, 6], [True, False]), ids=str
)  # fmt: skip
def test_several_fields_share_a_window(gpu, opened, ranks, has_windows, options, chunks):
    inputs = [X, X[::-1] * 2]
    u, v = (on_gpu(gpu, da.from_array(x, chunks=chunks)) for x in inputs)
    y = iterate(kernel(gpu, crossed), {"u": u, "v": v}, 1, 9, ranks=ranks, **options)
    results = run_section(gpu, y["u"], inputs, device=partial(Gpu, has_windows=has_windows))
    u, v = inputs
    for _ in range(9):
        new = SimpleNamespace(u=np.empty_like(u), v=np.empty_like(v))
        crossed(np.pad(u, 1, "wrap"), np.pad(v, 1, "wrap"), new)
        u, v = new.u, new.v
    assert np.array_equal(results[0], u)
    assert np.array_equal(results[1], v)
    gc.collect()
    gpu.check()
    size = len(opened)
    assert size <= 6, "one exchange for both fields on each rank"
    assert all(opened) if has_windows and size else not any(opened)
