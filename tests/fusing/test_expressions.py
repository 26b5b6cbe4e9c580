"""The option `p2p.fuse`, `compile` and `explain` for arrays of the package `dask_array`.

`tests.query_planning` uses them with the expressions of `dask.array` too.
"""

from dataclasses import replace
from importlib.util import find_spec

import dask
import dask.array as graphs
import numpy as np
import pytest
from dask.core import flatten
from distributed import wait
from xarray.namedarray.parallelcompat import list_chunkmanagers

import dask_p2p
from dask_p2p.config import checked_options
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.fusing.optimizer import AtScheduler
from dask_p2p.fusing.option import FusedExpression
from dask_p2p.fusing.planning.tasks import before_stores, unfused
from tests.fusing import programs
from tests.fusing.programs import PROGRAMS, array, check_compiled, check_values, same_bits, stencils
from tests.query_planning import check_sections
from tests.support import mostly_slow

pytestmark = pytest.mark.skipif(
    find_spec("dask_array") is None, reason="needs it: pip install dask-array"
)
CLUSTER = {"n_workers": 2}


@pytest.fixture
def da(dask_array, monkeypatch):
    """The package, which takes the place of `dask.array` in the programs."""
    xarray = pytest.importorskip("dask_array.xarray")
    monkeypatch.setattr(programs, "da", dask_array)
    xarray.register()
    yield dask_array
    list_chunkmanagers.cache_clear()


CASES = *((program, "on") for program in PROGRAMS), (stencils, "auto")


@pytest.mark.parametrize("case", mostly_slow(CASES, CASES[:1]))
def test_values_are_those_without_the_option(client, da, case, gangs):
    check_values(client, *case)
    assert gangs


@pytest.mark.parametrize("program", mostly_slow(PROGRAMS, [stencils]))
def test_compiled_programs(client, da, program):
    assert type(program(array())) is da.Array
    check_compiled(client, program)


def test_sections(client, da):
    check_sections(da, ranks=2)


def test_resident_gangs(client, da):
    x = (array() + 1).rechunk((8, -1))
    compiled = dask_p2p.compile(stencils, x)
    u = expected = x
    with compiled.resident(x) as run:
        for _ in range(3):
            u, expected = run(u), stencils(expected)
        values, y = run.fetch(u), run.array(u)
    assert type(y) is da.Array
    expected = expected.compute()
    assert same_bits(values, expected)
    assert same_bits((y + 1).compute(), expected + 1)


def test_arrays_of_two_libraries_are_refused(client, da):
    x, of_other_library = array(), graphs.from_array(np.ones((48, 48)), chunks=(6, 48))
    compiled = dask_p2p.compile(stencils, x)
    for call in (
        lambda: compiled(of_other_library),
        lambda: compiled.resident(of_other_library),
        lambda: dask_p2p.compile(lambda u: of_other_library + 1, x),
        lambda: dask_p2p.fused(x, of_other_library),
    ):
        with pytest.raises(UnsupportedArrayError, match="one library in a call"):
            call()
    with pytest.raises(InputError, match="collections of one library"):
        dask_p2p.explain(x, of_other_library)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Computing mixed collections")
def test_collections_of_two_libraries_in_one_call(client, da):
    x, of_other_library = (
        stencils(array()),
        graphs.from_array(np.ones((48, 48)), chunks=(6, 48)) + 1,
    )
    expected = dask.compute(x, of_other_library)
    with dask.config.set({"p2p.fuse": "on"}):
        computed = dask.compute(x, of_other_library)
    assert all(map(same_bits, computed, expected))


def test_auto_leaves_small_programs_to_dask(client, da, gangs):
    x = array()
    assert "too small to gain: 0 exchanges" in dask_p2p.explain(x + 1)
    assert "all tasks stay" in dask_p2p.explain(client.persist(x))
    with dask.config.set({"p2p.fuse": "auto"}):
        wait((x + 1).persist())
        with dask.annotate(priority=3):
            assert "no annotations of priority" in dask_p2p.explain(stencils(x))
            stencils(x).compute()
        client.compute(stencils(x), retries=2).result()
    stencils(x).compute()  # off by default
    assert not gangs


def test_reads_of_files_stay_with_dask(client, da, tmp_path):
    zarr = pytest.importorskip("zarr")
    values = np.random.default_rng(0).normal(size=(48, 48))
    stored = zarr.create_array(str(tmp_path / "x.zarr"), shape=(48, 48), chunks=(6, 48), dtype="f8")
    stored[:] = values
    y = dask_p2p.fused(stencils(da.from_zarr(stored)))
    assert sum(str(key[0]).startswith("from-zarr") for key in y.__dask_graph__()) == 8
    assert same_bits(y.compute(), stencils(da.from_array(values, chunks=(6, 48))).compute())


def test_writes_stay_with_dask(client, da, tmp_path, gangs):
    zarr = pytest.importorskip("zarr")
    y = stencils(array())
    expected = y.compute()
    target = zarr.create_array(str(tmp_path / "x.zarr"), shape=y.shape, chunks=(6, 48), dtype="f8")
    with dask.config.set({"p2p.fuse": "on"}):
        da.store(y, target, lock=False)
    assert same_bits(target[:], expected)
    assert gangs
    writes = da.store(y, target, lock=False, compute=False)
    keys = list(flatten([writes.__dask_keys__()]))
    _, after = before_stores(unfused(dict(writes.__dask_graph__())), keys)
    assert {*keys} <= {*after}


def test_an_optimiser_that_changes_chunks(client, da):
    """`dask_array` computes moving means in smaller blocks than it has declared."""
    values = np.arange(240.0).reshape(60, 4)
    x = da.from_array(values, chunks=(4, 4))
    moving = da.sliding_window_view(x, 9, axis=0).mean(axis=-1)
    expected = np.lib.stride_tricks.sliding_window_view(values, 9, axis=0).mean(axis=-1)
    for y in dask.compute(*dask_p2p.fused(moving, moving[:, 1:])):
        np.testing.assert_allclose(y, expected[:, -y.shape[1] :])
    compiled = dask_p2p.compile(lambda u: da.sliding_window_view(u, 9, axis=0).mean(axis=-1), x)
    np.testing.assert_allclose(compiled(x).compute(), expected)
    np.testing.assert_allclose(dask_p2p.compile(lambda u: u * 2, moving)(moving), 2 * expected)


class Annotated:
    """An expression with annotations."""

    _name = "x"

    def dependencies(self):
        return []

    def __dask_annotations__(self):
        return {"retries": {("x", 0): 2}}

    def __dask_graph__(self):
        return {("x", 0): 1}


def test_annotated_expressions_are_refused():
    function = AtScheduler(False, checked_options(), "", frozenset({"numpy"}), "")
    graph = FusedExpression(Annotated(), [("x", 0)], function).__dask_graph__()
    with pytest.raises(UnsupportedArrayError, match="without annotations, got retries"):
        dask.get(graph, ("x", 0))
    auto = replace(function, is_auto=True)
    sent = FusedExpression(Annotated(), [("x", 0)], auto)
    assert sent.__dask_graph__() == {("x", 0): 1}
    assert [*sent.__dask_annotations__()] == ["retries"]
