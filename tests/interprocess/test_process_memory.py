from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.transports.process_memory import (
    RemoteArray,
    obstacle,
    own_token,
    read,
    read_into,
    runs_of,
)
from tests.support import tune


def read_view(view):
    runs = runs_of(view.ctypes.data, view.shape, view.strides, view.itemsize)
    memory = np.empty(int(np.prod(runs.shape)) * view.itemsize, np.uint8)
    return np.broadcast_to(read(os.getpid(), runs, view.dtype, memory), view.shape)


@st.composite
def views(draw):
    """Regions of arrays of any memory layout: permuted, stepped, reversed, repeated."""
    dtype = draw(st.sampled_from(["u1", "f4", ">i8", "c16", "M8[ns]", "S3", "i2,f8"]))
    extents = draw(st.lists(st.integers(1, 9), max_size=4))
    base_array = np.zeros(extents, dtype)
    base_array.reshape(-1).view("u1")[:] = np.arange(base_array.nbytes) % 251
    view = base_array.transpose(draw(st.permutations(range(base_array.ndim))))
    for axis in range(view.ndim):
        step = draw(st.sampled_from([1, 1, 2, -1, -3]))
        view = view[(slice(None),) * axis + (slice(None, None, step),)]
        if draw(st.integers(0, 4)) == 0:
            first = view[(slice(None),) * axis + (slice(0, 1),)]
            view = np.broadcast_to(first, view.shape)
    return view


@given(views(), st.data())
def test_a_region_is_copied_to_where_it_belongs(view, data):
    """Or nowhere, if it lies there in another order."""
    margins = [data.draw(st.integers(0, 2)) for _ in view.shape]
    target_array = np.zeros(
        [n + 2 * m for n, m in zip(view.shape, margins, strict=True)], view.dtype
    )
    target_array.reshape(-1).view("u1")[:] = 77
    inner = tuple(slice(m, m + n) for n, m in zip(view.shape, margins, strict=True))
    expected = target_array.copy()
    runs = runs_of(view.ctypes.data, view.shape, view.strides, view.itemsize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dask_p2p.transports.process_memory.MOST_RUNS", data.draw(st.integers(1, 5)))
        tune(patch, process_run_bytes=1)
        is_done = read_into(os.getpid(), runs, target_array[(*inner, ...)])
    if is_done:
        expected[inner] = view
    elif view.flags.c_contiguous and not any(margins) and view.nbytes:
        pytest.fail("one run is copied to one")
    assert target_array.tobytes() == expected.tobytes()


def test_short_runs_are_not_copied_one_by_one():
    view = np.arange(64.0).reshape(8, 8)
    runs = runs_of(view.ctypes.data, view.shape, view.strides, view.itemsize)
    base_array = np.zeros((8, 10))
    assert not read_into(os.getpid(), runs, base_array[:, :8])
    assert not base_array.any()


def test_a_region_that_is_nowhere():
    runs = runs_of(8, (64,), (8,), 8)  # of no process
    with pytest.raises(OSError, match="address"):
        read_into(os.getpid(), runs, np.zeros(64))
    with os.fdopen(os.memfd_create("pages"), "r+b") as file:
        file.truncate(2 * mmap.PAGESIZE)
        array = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        file.truncate(mmap.PAGESIZE)
        with pytest.raises(OSError, match="address"):
            read_view(array)


def test_items_without_bytes():
    assert read_view(np.empty((3, 2), "V0")).shape == (3, 2)


def test_a_token_proves_which_process_is_read():
    address, token = own_token()
    assert (address, token) == own_token()
    assert obstacle(os.getpid(), address, token) is None
    wrong_token = bytes(byte ^ 1 for byte in token)
    assert obstacle(os.getpid(), address, wrong_token).code == "other-process"
    assert obstacle(os.getpid(), 8, token).code == "forbidden"
    assert obstacle(os.getpid(), 2**70, token).code == "forbidden"


@pytest.mark.parametrize("step", [1, 2, -1])
def test_a_remote_array_is_read_directly_where_the_order_in_memory_allows_it(step):
    x = np.arange(6000.0).reshape(2, 3000)[:, ::step]
    remote_array = RemoteArray(os.getpid(), x.ctypes.data, x.shape, x.strides, x.dtype)
    sizes = []

    def memory_of(nbytes):
        sizes.append(nbytes)
        return np.empty(nbytes, np.uint8)

    into = np.zeros(x.shape)
    assert (remote_array.read(into, memory_of) is into) == (step == 1)
    assert len(sizes) == (step != 1)
    np.testing.assert_array_equal(remote_array.read(None, memory_of), x)
    assert sizes[-1] == x.nbytes
