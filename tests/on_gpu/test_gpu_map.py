from __future__ import annotations

import pickle

import numpy as np

from dask_p2p.on_gpu.block import Argument, GpuMap


def argument(chunks, depth=0, dtype="f8"):
    widths = tuple((depth, depth) for _ in chunks)
    halo = tuple(
        tuple(((i > 0) * depth, (i < len(sizes) - 1) * depth) for i in range(len(sizes)))
        for sizes in chunks
    )
    return Argument(chunks, np.dtype(dtype), widths, halo)


def test_blocks_go_together_by_their_last_axes():
    sizes = ((2, 3), (4, 5))
    whole, row, column = argument(sizes, 1), argument((sizes[1],)), argument((sizes[0], (1,)))
    mapped = GpuMap(None, (row, column, whole), 0, sizes, sizes, np.dtype("f4"), 2**20)
    assert [each.own_index((1, 1)) for each in mapped.arguments] == [(1,), (1, 0), (1, 1)]
    assert [each.own_axis(0, sizes) for each in mapped.arguments] == [None, 0, 0]
    assert [each.own_axis(1, sizes) for each in mapped.arguments] == [0, None, 1]
    assert whole.shape((1, 1)) == (4, 6)
    assert (mapped.halo(0, (1, 1)), mapped.halo(1, (1, 1))) == ((0, 0), (0, 0)), "of the first"
    plan = mapped.plan((1, 1))
    assert [each.axis for each in plan.inputs] == [None, 0, 0]
    assert plan.result_bytes == 3 * 5 * 4
    assert pickle.loads(pickle.dumps(mapped)) == mapped


def test_blocks_are_cut_into_eight_parts_at_least_that_are_not_small():
    def parts(mebibytes, part_bytes=2**26):
        sizes = ((mebibytes * 2**10,), (128,))
        mapped = GpuMap(None, (argument(sizes),), 0, sizes, sizes, np.dtype("f8"), part_bytes)
        return len(mapped.plan((0, 0)).parts)

    assert [parts(n) for n in (4, 16, 20, 64, 128, 256, 512, 1024)] == [1, 1, 2, 4, 8, 8, 8, 16]
    assert parts(4, 2**20) == 4


def test_plans_of_unlike_blocks_bound_all_of_them():
    sizes = ((10, 9, 31, 10, 31), (8, 8, 8))
    mapped = GpuMap(None, (argument(sizes, 1),), 0, sizes, sizes, np.dtype("f8"), 700)
    most = max(sum(plan.device_bytes(3)) for plan in mapped.largest_plans())
    assert len(list(mapped.largest_plans())) == 3
    each = [sum(mapped.plan((i, j)).device_bytes(3)) for i in range(5) for j in range(3)]
    assert max(each) == most
    narrow = GpuMap(None, (argument(((4, 4),), 3),), 0, ((4, 4),), ((4, 4),), np.dtype("f8"), 99)
    (plan,) = narrow.largest_plans()
    assert plan.inputs[0].shape == (4 + 2 * 3,), "as no block here, but as one between two"
