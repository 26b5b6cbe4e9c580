"""Expressions: arrays of `dask.array` with query planning, and of the package `dask_array`."""

from threading import Lock

import numpy as np
import pytest
from dask.tokenize import TokenizationError

import dask_p2p
from dask_p2p import versions
from dask_p2p.engine.task import AssembleTask
from dask_p2p.errors import RegistrationError
from tests.graph.random_programs import doubled, of_rank
from tests.query_planning import check_groups, check_only_what_is_needed_runs, check_sections
from tests.support import indexed, output_of

VALUES = indexed((64, 48)).astype(float)


@pytest.mark.programs(7)
def test_results_are_expressions_with_query_planning():
    """Dask decides when `dask.array` is imported; no option changes it later."""
    output_of("-W", "error", "-m", "tests.query_planning", DASK_ARRAY__QUERY_PLANNING="True")


def test_private_parts_of_dask():
    from dask.array._array_expr._blockwise import Elemwise
    from dask.array._array_expr._expr import ArrayExpr, unify_chunks_expr
    from dask.array._array_expr._rechunk import Rechunk

    assert Elemwise._parameters == ["op", "dtype", "name", "where"]
    assert {"threshold", "method"} <= {*Rechunk._parameters}
    assert unify_chunks_expr() == ({}, [], False)
    for name in ("_simplify_up", "rechunk", "substitute_parameters", "dependencies"):
        assert hasattr(ArrayExpr, name), name


# --- arrays of `dask_array`


@pytest.fixture
def x(dask_array):
    return dask_array.from_array(VALUES, chunks=(8, 48))


def exchanges(y):
    """Number of arrays that this package's tasks assemble."""
    graph = y.__dask_graph__()
    return len({key[0] for key, task in graph.items() if isinstance(task, AssembleTask)})


def test_an_array_that_others_need_is_made_once(x):
    y = dask_p2p.transpose(x)
    total = y[:5].sum() + y.mean() + y.T.sum()
    assert exchanges(total) == 1
    expected = VALUES.T[:5].sum() + VALUES.mean() + VALUES.sum()
    assert total.compute(scheduler="sync") == pytest.approx(expected)


#: Operations whose plans, or arguments, follow from the chunks of their input.
DOUBLED = {
    "map_overlap": lambda y: dask_p2p.map_overlap(doubled, y, 1),
    "without a halo": lambda y: dask_p2p.map_overlap(lambda a, b: a + b, y, y, depth=0),
    "map_on_gpu": lambda y: dask_p2p.map_on_gpu(doubled, y, fallback="numpy"),
    "spmd": lambda y: dask_p2p.spmd(of_rank, y, ranks=1),
    "iterate": lambda y: dask_p2p.iterate(doubled, y, 0, 1, ranks=1),
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
    expected = np.lib.stride_tricks.sliding_window_view(values, 9, axis=0).mean(axis=-1)
    result = DOUBLED[operation](moving).compute(scheduler="sync")
    np.testing.assert_allclose(result, 2 * expected)


def test_what_holds_for_expressions_of_dask_too(dask_array):
    check_sections(dask_array)
    check_groups(dask_array)
    check_only_what_is_needed_runs(dask_array)


def test_functions_that_dask_cannot_tokenize(x):
    """Expressions refuse them, and so does `dask_array`; here they get a token of their own."""
    lock = Lock()

    def locked(ctx, block):
        with lock:
            return block * 2, block.sum()

    with pytest.raises(TokenizationError):
        x.map_blocks(lambda block: locked(None, block)[0])
    y, sums = dask_p2p.spmd(locked, x, ranks=1, per_rank=[0.0])
    total = y.sum() + sums.sum()
    assert len({key[0] for key in total.__dask_graph__() if "-ranks-" in str(key[0])}) == 1
    assert total.compute(scheduler="sync") == 3 * VALUES.sum()
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
    names = {"-".join(str(key[0]).split("-")[:2]) for key in y.__dask_graph__()}
    assert names <= {"p2p-fused", y.name}
    np.testing.assert_array_equal(y.compute(scheduler="sync"), 2 * (x.compute() + 1))


def test_a_release_that_is_not_supported_is_refused(monkeypatch, x):
    monkeypatch.setattr(versions, "DASK_ARRAY_RELEASES", "<0.1")
    versions.check_dask_array.cache_clear()
    try:
        with pytest.raises(RegistrationError, match=r"expected dask-array <0\.1 .* pip install"):
            dask_p2p.transpose(x)
    finally:
        versions.check_dask_array.cache_clear()
