"""Rechunks and halo exchanges of CuPy blocks: the values are those of NumPy."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from tests.gpu.support import on_gpu, on_host
from tests.support import persisted

pytestmark = pytest.mark.gpu(2)

X = np.random.default_rng(0).random((120, 90))


@pytest.mark.parametrize("transport", ["ipc", "ucx", "pinned", "comm"])
@pytest.mark.parametrize(
    ("before", "after", "axes"),
    [
        ((30, 90), (120, 23), None),
        ((30, 45), (30, 90), None),
        ((7, 90), ((8, *(7,) * 16), 90), None),
        ((30, 45), (17, 31), (1, 0)),
    ],
)
def test_rechunk(client, transport, before, after, axes):
    x = persisted(client, on_gpu(X, before))
    with dask.config.set({"p2p.transports.order": [transport]}):
        y = persisted(client, dask_p2p.rechunk(x, after, axes=axes))
    np.testing.assert_array_equal(on_host(y), X.transpose(axes or (0, 1)))


def star(block):
    out = block.copy()
    out[1:-1] += block[2:] - 2 * block[:-2]
    out[:, 1:-1] += 3 * block[:, 2:] - 4 * block[:, :-2]
    return out


@pytest.mark.parametrize("boundary", ["none", "periodic", "reflect", "nearest", 7.5], ids=str)
@pytest.mark.parametrize("corners", [True, False])
def test_map_overlap(client, boundary, corners):
    x = persisted(client, on_gpu(X, (30, 45)))
    y = persisted(client, dask_p2p.map_overlap(star, x, 2, boundary, corners=corners))
    expected = da.map_overlap(star, da.from_array(X, chunks=(30, 45)), depth=2, boundary=boundary)
    np.testing.assert_array_equal(on_host(y), expected.compute(scheduler="sync"))


def test_map_overlap_of_several_arrays_and_with_the_keywords_of_dask(client):
    def weighed(block, row, weight, block_info=None):
        block *= row  # which overwrites neither array
        row[...] = 0
        return block * weight + (block_info[0]["chunk-location"][1] if block_info else 0)

    x, row = (persisted(client, on_gpu(a, (30, 45))) for a in (X, X[:1]))
    y = dask_p2p.map_overlap(
        weighed,
        x,
        row,
        depth=[{0: 2}, 0],
        boundary="periodic",
        weight=da.ones(3).sum(),
        dtype=float,
    )
    expected = X * X[:1] * 3 + np.repeat([0, 1], 45)
    np.testing.assert_array_equal(on_host(persisted(client, y)), expected)
    np.testing.assert_array_equal(on_host(persisted(client, y * 1)), expected)
    for retained, values in ((x, X), (row, X[:1])):
        np.testing.assert_array_equal(on_host(retained), values)


def test_a_block_that_stays_is_handed_on(client):
    x = persisted(client, on_gpu(X, (30, 90)))
    y = persisted(client, dask_p2p.rechunk(x, ((30, 60, 30), (90,))))

    def same(a, b, dask_worker):
        blocks = [dask_worker.data.get(key) for key in (a, b)]
        return None if blocks[0] is None or blocks[1] is None else blocks[0] is blocks[1]

    results = set(client.run(same, (x.name, 0, 0), (y.name, 0, 0)).values())
    assert results == {True, None}
