from __future__ import annotations

import dask
import dask.array as da
import pytest

from dask_p2p.fusing.planning.sizes import blocks_of_expression, blocks_of_layers


def test_blocks_of_layers():
    x = da.ones((6, 4), chunks=(2, 4), dtype="f4")
    y = (x + 1).rechunk((3, 2), method="tasks")
    found = blocks_of_layers(y.__dask_graph__().layers)
    assert found[x.name] == (x.chunks, x.dtype)
    assert found[y.name] == (y.chunks, y.dtype)
    assert not blocks_of_layers(dask.delayed(sum)([1]).__dask_graph__().layers)


@pytest.mark.parametrize("merges", [False, True])
def test_blocks_of_expressions(dask_array, merges):
    """Merged operations have parts."""
    x = dask_array.ones((6, 4), chunks=(2, 4), dtype="f4")
    y = (x[:, None] - x[None]) * 2
    names = {each._name: each for each in y.expr.optimize(fuse=False).walk()}
    found = blocks_of_expression(y.expr.optimize(fuse=merges))
    assert {name for name, each in names.items() if hasattr(each, "chunks")} <= {*found}
    assert (((2,) * 3, (2,) * 3, (4,)), "f4") in found.values()
