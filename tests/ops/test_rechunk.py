from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array.utils import assert_eq
from hypothesis import given
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.errors import InputError
from tests.plans.support import chunks_of
from tests.support import layers_of

X = np.arange(4 * 6 * 5).reshape(4, 6, 5)


@pytest.mark.parametrize(
    "chunks",
    ["auto", 2, -1, (2, 3, 5), (-1, None, 2), {0: 1, -1: "auto"}, {1: (1, 5)}, "80 B", {0: None}],
    ids=str,
)
@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.filterwarnings("ignore:chunk size balancing not possible")
def test_chunks_are_those_of_dask(chunks, balance):
    x = da.from_array(X, chunks=(3, 4, 2))
    result = dask_p2p.rechunk(x, chunks, balance=balance)
    expected = da.rechunk(x, chunks, balance=balance)
    assert result.chunks == expected.chunks
    assert_eq(result, expected)


def test_an_axis_without_elements_is_balanced_as_it_is():
    """Dask divides by its length."""
    x = da.ones((0, 10), chunks=(0, 3))
    assert dask_p2p.rechunk(x, {1: 5}, balance=True).chunks == ((0,), (5, 5))


@pytest.mark.filterwarnings("ignore:chunk size balancing not possible")
@pytest.mark.parametrize(
    "chunks", [(1, 2, 3, 4), (-1, None, 5, 2), [(4,), 3, 1, 9], {0: "auto"}], ids=str
)
def test_parameters_in_the_order_of_dasks(chunks):
    """Chunks of axes that there are not are ignored too."""
    x = da.from_array(X, chunks=(3, 4, 2))
    for arguments in ((4, None, False, "p2p"), (None, 240, True, "tasks")):
        result = dask_p2p.rechunk(x, chunks, *arguments)
        assert result.chunks == da.rechunk(x, chunks, *arguments[:-1], "tasks").chunks
    short = da.arange(6, chunks=6)
    assert dask_p2p.rechunk(short, (2, 4)).chunks == da.rechunk(short, (2, 4)).chunks
    with pytest.raises(InputError, match=r"expected method 'tasks' or 'p2p'.*got 'MPI'.*Leave"):
        dask_p2p.rechunk(x, 2, method="MPI")


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    axes = tuple(draw(st.permutations(range(len(shape)))))
    before = tuple(chunks_of(draw, n) for n in shape)
    return shape, before, axes, tuple(chunks_of(draw, shape[axis]) for axis in axes)


@given(cases())
def test_any_grid_to_any_grid(case):
    shape, before, axes, after = case
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    y = dask_p2p.rechunk(da.from_array(x, chunks=before), after, axes=axes)
    layers_of(y)
    assert y.chunks == after
    assert_eq(y, x.transpose(axes), scheduler="sync")


def test_nothing_to_do_gives_the_array_itself():
    x = da.ones((4, 4), chunks=(2, 4))
    assert dask_p2p.rechunk(x, (2, 4)) is x
    assert dask_p2p.rechunk(x, {0: 2}, axes=(0, 1)) is x
    assert dask_p2p.transpose(x, (0, 1)) is x


def test_one_layer_and_blocks_that_stay_are_handed_on():
    blocks = [np.full((2, 3), i) for i in range(4)]
    x = da.concatenate([da.from_array(b, chunks=-1, asarray=False) for b in blocks[:3]])
    y = dask_p2p.rechunk(x, ((2, 4), (3,)))
    assert set(layers_of(y)) - set(layers_of(x)) == {y.name}
    task = layers_of(y)[y.name][y.name, 0, 0]
    assert task({(x.name, 0, 0): blocks[0]}) is blocks[0]


def test_unknown_sizes_are_fine_along_axes_that_stay():
    x = da.from_array(X[0], chunks=(2, 3))
    rows = x[x[:, 0] > 6]
    assert np.isnan(rows.shape[0])
    result = dask_p2p.rechunk(rows, {1: 5})
    assert result.numblocks == (3, 1)
    np.testing.assert_array_equal(result.compute(scheduler="sync"), X[0][X[0][:, 0] > 6])
    turned = dask_p2p.rechunk(rows, {0: 5}, axes=(1, 0))
    np.testing.assert_array_equal(turned.compute(scheduler="sync"), X[0][X[0][:, 0] > 6].T)
    assert dask_p2p.rechunk(rows, rows.chunks) is rows
    for chunks in ({0: 2}, -1, (2, 5)):
        with pytest.raises(InputError, match=r"(?s)known chunk sizes.*compute_chunk_sizes"):
            dask_p2p.rechunk(rows, chunks)


@pytest.mark.parametrize(
    ("chunks", "axes"),
    [*((chunks, None) for chunks in ((2, 2), {3: 1}, "a lot", -2)), (5, (0, 1)), (2, (0, 0, 1))],
    ids=str,
)
def test_wrong_input(chunks, axes):
    with pytest.raises(InputError, match=r"(?i)expected .* got "):
        dask_p2p.rechunk(da.from_array(X, chunks=2), chunks, axes=axes)


@pytest.mark.parametrize("axes", [None, (2, 0, 1)])
def test_blocks_of_groups_are_those_that_were_asked_for(axes):
    x = da.from_array(X, chunks=(4, 2, 5))
    shape = X.transpose(axes or (0, 1, 2)).shape
    after = ((1,) * shape[0], (shape[1],), (shape[2],))
    with dask.config.set({"p2p.groups": 2}):
        y = dask_p2p.rechunk(x, after, axes=axes)
    assert y.chunks == after
    assert_eq(y, X.transpose(axes or (0, 1, 2)), scheduler="sync")
    (layer,) = (layer for name, layer in layers_of(y).items() if name.startswith("p2p-"))
    assert len(layer) == 2


def test_a_large_graph_has_few_edges():
    x = da.zeros((1000, 1000), chunks=(2, 1000))
    y = dask_p2p.transpose(x, chunks=(2, 1000))
    assert y.chunks == ((2,) * 500, (1000,))
    edges = sum(len(dependencies) for dependencies in y.dask.get_all_dependencies().values())
    assert edges < 40_000
    output_bytes = dask_p2p.estimate(x, chunks=(2, 1000), workers=4).output_bytes
    assert x.nbytes / 4 <= output_bytes < x.nbytes / 3  # whole groups
