"""What all transports share: obstacles, probes and parts."""

from __future__ import annotations

from math import prod
from unittest.mock import MagicMock

import numpy as np
import pytest

from dask_p2p.backends.kernels.copies import engine_pitch
from dask_p2p.config import options
from dask_p2p.errors import Obstacle, TransferError
from dask_p2p.geometry import box_shape, box_size
from dask_p2p.transports.base import Reading, Region, Request, Transport
from dask_p2p.transports.buffers import Footprint


class Ferry(Transport):
    name, kinds = "ferry", ("numpy",)
    handlers = footprint = read = close = None

    def __init__(self):
        self.options = options()

    def holder_obstacle(self, holder):
        return Obstacle("far", "it is far away") if holder == "far" else None


@pytest.mark.parametrize(
    ("holder", "kind", "dtype", "text"),
    [
        ("near", "numpy", "f8", None),
        ("far", "numpy", "f8", "it is far away"),
        ("far", "cupy", "f8", "ferry moves NumPy blocks, not cupy"),
        ("near", "numpy", object, "ferry moves bytes, not Python objects"),
        ("near", "numpy", [("a", "i1"), ("b", object)], "ferry moves bytes, not Python objects"),
    ],
    ids=str,
)
def test_what_a_transport_does_not_move_is_an_obstacle(holder, kind, dtype, text):
    obstacle = Ferry().obstacle(holder, kind, np.dtype(dtype))
    assert (obstacle and obstacle.text) == text
    Ferry.moves_objects = True
    try:
        obstacle = Ferry().obstacle(holder, kind, np.dtype(dtype))
        assert (obstacle is None) == (holder == "near")
    finally:
        Ferry.moves_objects = False


@pytest.mark.parametrize("error", [TransferError("trouble"), TimeoutError()], ids=repr)
def test_a_probe_that_fails_says_so_and_leaves_nothing_open(error, monkeypatch):
    reading = MagicMock()
    reading.__iter__.return_value = [Region(0, 0, ((0, 1),)).mark_failed(error)]
    monkeypatch.setattr(Ferry, "read", lambda transport, requests, options: reading)
    with pytest.raises(TransferError, match=r"trouble|the worker's event loop did not respond"):
        Ferry().probe("there", "numpy")
    reading.close.assert_called_once()


class _Nothing(Reading):
    """Regions that nobody asks for."""

    __iter__ = close = None


@pytest.mark.parametrize(
    ("kind", "fast_axis", "shape"),
    [
        ("cupy", 0, (256, 16, 64)),  # rows of 1 KiB, along all of the axis
        ("cupy", 1, (16, 256, 64)),
        ("cupy", None, (16, 256, 64)),
        ("numpy", 0, (16, 256, 64)),  # a processor writes them item by item
    ],
)
def test_parts_for_gpus_keep_rows_of_the_output_whole(kind, fast_axis, shape):
    box = ((0, 256), (0, 256), (0, 64))
    request = Request("key", "holder", (256, 256, 64), np.dtype("f4"), kind, [box], fast_axis)
    reading = _Nothing([request], Footprint(2**20, 1))
    parts = [part.box for part in reading.parts()]
    assert {box_shape(part) for part in parts} == {shape}
    assert sum(map(box_size, parts)) == 256 * 256 * 64


@pytest.mark.parametrize(
    ("request_shape", "block", "part"),
    [
        ((256, 256, 64), (256, 512, 64), (256, 16, 64)),
        ((256, 4, 4096), (256, 4, 8192), (256, 4, 256)),  # not along axis 1: rows have gaps
        ((256, 256, 64), (256, 256, 128), (16, 256, 64)),  # too little would be left of rows
    ],
)
def test_parts_of_a_part_of_a_block_are_what_copy_engines_copy(request_shape, block, part):
    box = tuple((0, length) for length in request_shape)
    request = Request("key", "holder", block, np.dtype("f4"), "cupy", [box], 0)
    parts = [region.box for region in _Nothing([request], Footprint(2**20, 1)).parts()]
    assert {box_shape(box) for box in parts} == {part}
    strides = [4 * prod(block[axis + 1 :]) for axis in range(3)]
    assert engine_pitch(part, tuple(strides), 4) is not None
