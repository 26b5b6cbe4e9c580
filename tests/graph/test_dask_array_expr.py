from __future__ import annotations

import inspect
import pickle
from importlib.util import find_spec
from threading import Lock

import numpy as np
import pytest
from dask.tokenize import TokenizationError

import dask_p2p
from dask_p2p import versions
from dask_p2p.engine.task import AssembleTask
from dask_p2p.errors import RegistrationError
from tests.support import indexed

pytestmark = pytest.mark.skipif(
    find_spec("dask_array") is None, reason="needs it: pip install dask-array"
)

VALUES = indexed((64, 48)).astype(float)


@pytest.fixture
def x(dask_array):
    return dask_array.from_array(VALUES, chunks=(8, 48))


def exchanges(y):
    """Names of the arrays that this package's tasks assemble, and the number of these tasks."""
    graph = y.__dask_graph__()
    tasks = {key: task for key, task in graph.items() if isinstance(task, AssembleTask)}
    return {key[0].rpartition("-")[0] for key in tasks}, len({key[0] for key in tasks}), len(tasks)


def prefixes(y):
    """Beginnings of the names of tasks that an array needs, besides itself."""
    return {"-".join(str(key[0]).split("-")[:2]) for key in y.__dask_graph__() if key[0] != y.name}


def read(y):
    """Number of elements that this package's tasks read."""
    tasks = [t for t in y.__dask_graph__().values() if isinstance(t, AssembleTask)]
    return sum(sum(task.plan.source_elements(task.index)) for task in tasks)


SLICES = {
    "rows": np.s_[:10],
    "columns": np.s_[:, 5:9],
    "a row": np.s_[3],
    "a column": np.s_[:, -1],
    "backwards": np.s_[::-2, 3:],
    "nothing": np.s_[4:4],
    "one element": np.s_[7, 9],
}


@pytest.mark.parametrize("index", SLICES.values(), ids=SLICES)
def test_a_slice_is_taken_before_the_exchange(index, x):
    wanted = VALUES.T[index]
    sliced = dask_p2p.transpose(x)[index]
    assert read(sliced) <= wanted.size
    np.testing.assert_array_equal(sliced.compute(scheduler="sync"), wanted)
    assert sliced.chunks == dask_p2p.transpose(x).persist(scheduler="sync")[index].chunks


OPERATIONS = {
    "P2PRechunk": lambda x: dask_p2p.rechunk(x, (64, 6)),
    "P2PTranspose": lambda x: dask_p2p.transpose(x),
    "P2POverlap": lambda x: dask_p2p.map_overlap(np.negative, x, depth=1),
    "P2PTransform": lambda x: dask_p2p.fft.fft(x, axis=0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_list_of_operations_names_ours(name, x):
    planned = OPERATIONS[name](x).expr.optimize(fuse=False)
    assert name in repr(planned)
    assert type(pickle.loads(pickle.dumps(planned))) is type(planned)


@pytest.mark.parametrize("index", [np.s_[[3, 1, 5]], np.s_[None, :3], np.s_[..., 4]], ids=str)
def test_other_indices(index, x):
    found = dask_p2p.transpose(x)[index].compute(scheduler="sync")
    np.testing.assert_array_equal(found, VALUES.T[index])


def test_slices_of_three_axes(dask_array):
    values = indexed((6, 8, 10))
    x = dask_array.from_array(values, chunks=(2, 3, 4))
    for index in (np.s_[1, :, 2:5], np.s_[:, 3], np.s_[2:, :, 1], np.s_[0, 0], np.s_[:, :, :0]):
        y = dask_p2p.transpose(x, (2, 0, 1), chunks=(3, 2, 4))[index]
        np.testing.assert_array_equal(y.compute(scheduler="sync"), values.transpose(2, 0, 1)[index])


def test_a_transpose_of_a_transpose_is_the_array(x):
    assert dask_p2p.transpose(dask_p2p.transpose(x)).expr.simplify() is x.expr
    assert dask_p2p.rechunk(dask_p2p.transpose(x).T, x.chunks).expr.simplify() is x.expr


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda x: dask_p2p.rechunk(dask_p2p.rechunk(x, (5, 7)), (-1, 6)), VALUES),
        (lambda x: dask_p2p.rechunk(x, (5, 7)).rechunk((-1, 6)), VALUES),
        (lambda x: dask_p2p.rechunk(x.T, (6, -1)), VALUES.T),
        (lambda x: dask_p2p.transpose(dask_p2p.rechunk(x, (5, 7))), VALUES.T),
        (lambda x: dask_p2p.transpose(x).T, VALUES),
        (lambda x: dask_p2p.transpose(x.persist(scheduler="sync").rechunk((5, 7))), VALUES.T),
        (lambda x: dask_p2p.transpose((x + 1).T.rechunk((4, 4))), VALUES + 1),
    ],
)
def test_neighbours_are_one_exchange(change, wanted, x):
    y = change(x)
    assert exchanges(y)[1] == 1
    assert not [name for name in prefixes(y) if name.startswith(("rechunk", "transpose"))]
    np.testing.assert_array_equal(y.compute(scheduler="sync"), wanted)


def test_blocks_that_are_only_split_are_views(x):
    y = dask_p2p.transpose(x).rechunk((3, -1))
    assert exchanges(y)[2] == dask_p2p.transpose(x).npartitions
    np.testing.assert_array_equal(y.compute(scheduler="sync"), VALUES.T)


def test_an_array_that_others_need_is_made_once(x):
    y = dask_p2p.transpose(x)
    total = y[:5].sum() + y.mean() + y.T.sum()
    assert exchanges(total)[1] == 1
    assert read(total) == VALUES.size
    wanted = VALUES.T[:5].sum() + VALUES.mean() + VALUES.sum()
    assert total.compute(scheduler="sync") == pytest.approx(wanted)


def test_a_sum_of_a_slice_reads_the_slice(dask_array):
    x = dask_array.ones((512, 64), chunks=(8, 64)) + 1
    y = dask_p2p.transpose(x)[:8].sum()
    assert read(y) == 8 * 512
    assert y.compute(scheduler="sync") == 8 * 512 * 2


def doubled(block):
    return block * 2


def of_rank(ctx, block):
    return block * 2


#: Operations whose plans, or arguments, follow from the chunks of their input.
DOUBLED = {
    "map_overlap": lambda y: dask_p2p.map_overlap(doubled, y, 1),
    "without a halo": lambda y: dask_p2p.map_overlap(lambda a, b: a + b, y, y, depth=0),
    "map_on_gpu": lambda y: dask_p2p.map_on_gpu(doubled, y, fallback="numpy"),
    "spmd": lambda y: dask_p2p.spmd(of_rank, y, ranks=1),
    "transpose": lambda y: dask_p2p.transpose(dask_p2p.transpose(y) * 2),
    "fft": lambda y: 2 * dask_p2p.fft.ifft2(dask_p2p.fft.fft2(y)).real,
    "fft of a whole axis": lambda y: 2 * dask_p2p.fft.ifft(dask_p2p.fft.fft(y)).real,
    "fused": lambda y: dask_p2p.fused(dask_p2p.rechunk(y, (7, -1)) * 2, ranks=1),
}


@pytest.mark.parametrize("operation", DOUBLED)
def test_an_optimiser_that_changes_chunks(operation, dask_array):
    """`dask_array` computes moving means in smaller blocks than it has declared."""
    values = indexed((60, 4)).astype(float)
    x = dask_array.from_array(values, chunks=(4, 4))
    moving = dask_array.sliding_window_view(x, 9, axis=0).mean(axis=-1)
    assert moving.expr.optimize().chunks != moving.chunks
    wanted = np.lib.stride_tricks.sliding_window_view(values, 9, axis=0).mean(axis=-1)
    found = DOUBLED[operation](moving).compute(scheduler="sync")
    np.testing.assert_allclose(found, 2 * wanted)


def test_estimates(x):
    y = dask_p2p.fft.ifft2(dask_p2p.fft.fft2(x) * 2)
    assert y.chunks == x.chunks
    assert dask_p2p.fft.estimate(y, workers=3).exchanges == 2
    assert dask_p2p.estimate(x, workers=2).input_bytes == VALUES.nbytes // 2
    assert dask_p2p.estimate(dask_p2p.spmd(of_rank, x, ranks=1)).workers == 1
    mapped = dask_p2p.map_on_gpu(doubled, x, part_bytes=800, fallback="numpy")
    assert 0 < dask_p2p.estimate(mapped).total_bytes < VALUES.nbytes * 2


def test_persisted_and_lazy_arrays_mix(x):
    y = dask_p2p.transpose(x).persist(scheduler="sync")
    both = dask_p2p.map_overlap(np.add, dask_p2p.transpose(y), x + 1, depth=1)
    np.testing.assert_array_equal(both.compute(scheduler="sync"), 2 * VALUES + 1)


def test_functions_that_dask_cannot_tokenize(x):
    """Expressions refuse them, and so does `dask_array`; here they get a token of their own."""
    lock = Lock()

    def locked(ctx, block):
        with lock:
            return block * 2, block.sum()

    with pytest.raises(TokenizationError):
        x.map_blocks(lambda block: locked(None, block)[0])
    y, sums = dask_p2p.spmd(locked, x, ranks=1, per_rank=[0.0])
    both = y.sum() + sums.sum()
    assert len({key[0] for key in both.__dask_graph__() if "-ranks-" in str(key[0])}) == 1
    assert both.compute(scheduler="sync") == 3 * VALUES.sum()
    z = dask_p2p.map_overlap(lambda block: locked(None, block)[0], x, 1, dtype=float)
    np.testing.assert_array_equal((z + z.T.T).compute(scheduler="sync"), 4 * VALUES)


@pytest.mark.parametrize("make", ["ones", "full", "arange", "linspace", "random", "normal"])
def test_ranks_of_fused_graphs_make_arrays_of_few_numbers(make, dask_array):
    x = {
        "ones": lambda: dask_array.ones(8, chunks=2),
        "full": lambda: dask_array.full(8, 3.0, chunks=2),
        "arange": lambda: dask_array.arange(8, chunks=2),
        "linspace": lambda: dask_array.linspace(0, 1, 8, chunks=2),
        "random": lambda: dask_array.random.RandomState(0).random(8, chunks=2),
        "normal": lambda: dask_array.random.default_rng(0).normal(size=8, chunks=2),
    }[make]()
    y = dask_p2p.fused(dask_p2p.rechunk(x + 1, 3) * 2, ranks=1)
    assert prefixes(y) <= {"p2p-fused"}
    np.testing.assert_array_equal(y.compute(scheduler="sync"), 2 * (x.compute() + 1))


def test_a_release_that_is_not_supported_is_refused(monkeypatch, x):
    monkeypatch.setattr(versions, "DASK_ARRAY_RELEASES", "<0.1")
    versions.check_dask_array.cache_clear()
    try:
        with pytest.raises(RegistrationError, match=r"expected dask-array <0\.1 .* pip install"):
            dask_p2p.transpose(x)
    finally:
        versions.check_dask_array.cache_clear()


# --- private parts of `dask_array`, as this package knows them


def test_parts_of_expressions(dask_array):
    from dask_p2p.graph import dask_array_expr as own

    for name in (
        *("_simplify_up", "_simplify_down", "_lower", "_layer", "_slice_pushdown"),
        *("_other_dependents", "_preserve_grid_contract", "_unlink_pushed_dependency"),
        *("_requires_grid_preservation", "_allow_no_cull_slice_pushdown", "rechunk"),
    ):
        assert hasattr(own.ArrayExpr, name), name
    assert hasattr(own.Transpose, "_accept_slice")
    assert own.ChunksFreeze._parameters == ["array", "_chunks"]
    assert own.Transpose._parameters == ["array", "axes"]
    assert own.Elemwise._parameters == [
        *("op", "dtype", "name", "where", "out", "_user_kwargs"),
    ]
    assert {*own.reductions.Reduction.__subclasses__()} >= own._EXACT
    assert {*own.reductions.Reduction._parameters} >= {
        *("array", "axis", "keepdims", "split_every", "weights"),
    }
    assert [*inspect.signature(own.choose_method).parameters] == [
        *("old_chunks", "new_chunks", "threshold"),
    ]


def test_what_install_replaces():
    from dask_p2p.graph import dask_array_expr as own

    assert own.Rechunk._parameters == [
        *("array", "_chunks", "threshold", "block_size_limit", "balance", "method"),
    ]
    assert own.MapOverlap._parameters == [
        *("array", "func", "depth", "boundary", "trim_output", "allow_rechunk", "kwargs"),
    ]
    assert own.OverlapInternal._parameters == ["array", "axes"]
    assert [*inspect.signature(own.overlaps._map_overlap_direct).parameters] == [
        *("func", "args", "depth", "boundary", "trim", "allow_rechunk", "kwargs"),
    ]
    for name in ("_pushdown", "_pushdown_into_io", "_pushdown_through_concatenate"):
        assert [*inspect.signature(getattr(own.Rechunk, name)).parameters] == ["self"]
    assert "_native_moving_window" in vars(own.MapOverlap)
    assert hasattr(own._LOWER_CACHE, "clear")
