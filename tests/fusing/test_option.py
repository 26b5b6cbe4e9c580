"""Ordinary programs with the option `p2p.fuse`, on two workers with Dask's default settings."""

import asyncio

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait

import dask_p2p
from dask_p2p.errors import ConfigError, UnsupportedArrayError
from dask_p2p.fusing import suitability as graph
from tests.fusing import programs
from tests.fusing.programs import PROGRAMS, array, check_values, same_bits, solver, stencils
from tests.fusing.support import Counter, smooth
from tests.support import BOUND_S, mostly_slow, output_of
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2}


QUICK = [stencils, solver, programs.of_functions]
GAINING = stencils, solver, programs.rechunks, programs.rechunks_of_dask


@pytest.mark.parametrize("program", mostly_slow(PROGRAMS, QUICK))
@pytest.mark.parametrize("mode", mostly_slow(["on", "auto"], ["on"]))
def test_values_are_those_without_the_option(client, program, mode, gangs):
    check_values(client, program, mode)
    if mode == "on" or program in GAINING:
        assert len(gangs) == 2


def test_off_is_the_default(client, gangs):
    stencils(array()).compute()
    with dask.config.set({"p2p.fuse": "off"}):
        stencils(array()).compute()
    assert not gangs


def test_one_gang_computes_several_collections(client, gangs):
    x = array()
    y, z = stencils(x), stencils(x).sum(axis=0)
    expected = dask.compute(y, z)
    with dask.config.set({"p2p.fuse": "auto"}):
        computed = dask.compute(y, z)
        persisted = dask.persist(y, z)
        wait(persisted)
    assert len(gangs) == 2
    for one, expected_value, on_workers in zip(computed, expected, persisted, strict=True):
        assert same_bits(one, expected_value)
        assert same_bits(on_workers, expected_value)


def test_a_section_runs_before_the_gang(client, gangs):
    x = array()

    def program(x):
        y = dask_p2p.iterate(smooth, stencils(x), {0: 1}, 3, boundary="periodic")
        return stencils(y).sum(axis=1)

    expected = program(x).compute()
    with dask.config.set({"p2p.fuse": "auto"}):
        assert same_bits(program(x).compute(timeout=BOUND_S), expected)
    assert len(gangs) == 1


@pytest.mark.parametrize("mode", mostly_slow(["auto", "on"], ["on"]))
def test_other_schedulers_and_optimize(client, mode, tmp_path):
    y = stencils(array())
    expected = y.compute()
    with dask.config.set({"p2p.fuse": mode}):
        assert same_bits(y.compute(scheduler="sync"), expected)
        assert same_bits(dask.optimize(y)[0].compute(), expected)
        assert same_bits(y.compute(optimize_graph=False), expected)
        da.to_npy_stack(str(tmp_path), y)
    assert same_bits(da.from_npy_stack(str(tmp_path)).compute(), expected)


def task_keys(dask_scheduler):
    return {*dask_scheduler.tasks}


@pytest.mark.parametrize("modes", [("auto", "auto"), ("off", "auto"), ("on", "auto")])
@pytest.mark.parametrize("make", [lambda x: x.map_blocks(np.sin).map_blocks(np.cos), stencils])
def test_an_array_that_is_persisted_twice_leaves_no_tasks(client, modes, make, caplog):
    """Such as by a cell of a notebook that runs again."""
    y, old_keys = make(array() * 7), client.run_on_scheduler(task_keys)  # of other tests
    for mode in modes:
        with dask.config.set({"p2p.fuse": mode}):
            persisted_again = y.persist()
            wait(persisted_again)
            del persisted_again
    wait_until(lambda: client.run_on_scheduler(task_keys) <= old_keys)
    assert "run_spec" not in caplog.text


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_tasks_that_write_stay_with_dask(mode, gangs):
    y = stencils(array())
    expected = y.compute()
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster),
        dask.config.set({"p2p.fuse": mode}),
    ):
        target, second_target = np.zeros_like(expected), np.zeros_like(expected)
        da.store([y, y + 1], [target, second_target])
        assert same_bits(target, expected)
        assert same_bits(second_target, expected + 1)
        stored = da.store(y, target * 0, return_stored=True, compute=False)
        assert same_bits(stored.sum().compute(), y.sum().compute(scheduler="sync"))
    assert gangs


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_results_of_several_classes_of_blocks_keep_their_order(client, mode):
    x = array()
    y = da.ma.masked_less(x, 0)
    with dask.config.set({"p2p.fuse": mode}):
        computed = dask.compute(y.sum(axis=0), x.sum(), y, x + 1)
    for one, lazy in zip(computed, (y.sum(axis=0), x.sum(), y, x + 1), strict=True):
        expected = lazy.compute()
        assert type(one) is type(expected)
        assert same_bits(np.ma.filled(one, 0), np.ma.filled(expected, 0))


def overwritten(block):
    block += 1
    return block


def test_functions_that_keep_a_state(client, gangs):
    """Each task of Dask has a copy of its own."""
    y = dask_p2p.transpose(array().map_blocks(Counter(), dtype=float))
    expected = y.compute()
    with dask.config.set({"p2p.fuse": "on"}):
        assert same_bits(y.compute(), expected)
    assert len(gangs) == 1


def test_functions_that_overwrite_blocks_in_use(client, gangs):
    x = client.persist(array())
    values = array().compute()
    y = (x.T + 1).T
    with dask.config.set({"p2p.fuse": "on"}):
        changed, views, unchanged, total = dask.compute(
            y.map_blocks(overwritten, dtype=float), x.T.map_blocks(overwritten, dtype=float),
            y, y.sum(axis=0),
        )  # fmt: skip
    assert len(gangs) == 1
    for computed, expected in (
        (changed, values + 1 + 1), (views, values.T + 1), (unchanged, values + 1),
        (x.compute(), values),
    ):  # fmt: skip
        assert same_bits(computed, expected)
    assert same_bits(total, y.sum(axis=0).compute())


def check_that_dask_computes(words):
    """Check that `auto` leaves a program to Dask where `on` raises an error."""
    y = stencils(array())
    with dask.config.set({"p2p.fuse": "auto"}):
        assert same_bits(y.compute(), y.compute(scheduler="sync"))
    with dask.config.set({"p2p.fuse": "on"}), pytest.raises(UnsupportedArrayError, match=words):
        y.compute()


def test_functions_that_cannot_be_pickled(client, monkeypatch):
    def failing(*_):
        raise TypeError("no pickle")

    monkeypatch.setattr(graph, "fused_gang", failing)
    check_that_dask_computes("pickled")


def test_without_a_client():
    check_that_dask_computes("synchronous client")


def cannot_be_fused():
    with dask.annotate(retries=3):
        return stencils(array())


@pytest.mark.parametrize(
    "failing",
    [
        lambda client, x: x.persist().compute(),
        lambda client, x: (wait(x := x.persist()), x.sum().compute()),
        lambda client, x: client.persist(x).compute(),
        lambda client, x: client.compute(x).result(),
        lambda client, x: client.gather(client.compute([x, x + 1])),
        lambda client, x: dask.persist(x, x + 1)[1].compute(),
        lambda client, x: dask.compute(dask.persist(x, dask.delayed(3))[0] + 1),
    ],
)
def test_graphs_that_no_gang_can_run_fail_with_the_reason(client, failing):
    with (
        dask.config.set({"p2p.fuse": "on"}),
        pytest.raises(UnsupportedArrayError, match="annotated with retries=3"),
    ):
        failing(client, cannot_be_fused())


def test_arrays_in_memory_keep_their_values_beside_a_graph_that_fails(client):
    x = client.persist(array())
    wait(x)
    with dask.config.set({"p2p.fuse": "on"}):
        same, failed = dask.persist(x, cannot_be_fused())
    assert same_bits(same.compute(), array().compute())
    with pytest.raises(UnsupportedArrayError, match="annotated with retries=3"):
        failed.compute()


def test_own_functions_that_optimise(client):
    graphs_seen = []

    def of_user(graph, keys, **kwargs):
        graphs_seen.append(len(graph))
        return graph

    with dask.config.set({"p2p.fuse": "on", "array_optimize": of_user}):
        assert array().sum().compute(scheduler="sync") == pytest.approx(array().compute().sum())
    assert graphs_seen


def test_an_invalid_value():
    with dask.config.set({"p2p.fuse": "sometimes"}), pytest.raises(ConfigError, match="off, auto"):
        da.ones(3).compute()
    with dask.config.set({"p2p.fuse": False}):  # YAML's off
        assert da.ones(3).sum().compute() == 3


def test_asynchronous_clients(client):
    y = stencils(array())
    expected = y.compute(scheduler="sync")

    async def computed(mode):
        async with Client(client.scheduler.address, asynchronous=True) as async_client:
            with dask.config.set({"p2p.fuse": mode}):
                return await async_client.compute(y)

    assert same_bits(asyncio.run(computed("auto")), expected)
    with pytest.raises(UnsupportedArrayError, match="synchronous client"):
        asyncio.run(computed("on"))


OF_ARRAYS = """
from dask_p2p.fusing.option import Optimization
assert isinstance(vars(dask.array.Array)["__dask_optimize__"], Optimization)
import sys; assert "distributed" not in sys.modules
"""
OF_EXPRESSIONS = "assert hasattr(distributed.Client._graph_to_futures, '__wrapped__')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "check", "planning"),
    [
        ("dask_p2p, dask.array", OF_ARRAYS, "False"),
        ("dask.array, dask_p2p", OF_ARRAYS, "False"),
        ("dask_p2p, dask.array, distributed", OF_EXPRESSIONS, "True"),
        ("dask.array, distributed, dask_p2p", OF_EXPRESSIONS, "True"),
        ("distributed, dask_p2p, dask.array", OF_EXPRESSIONS, "True"),
    ],
)
def test_the_option_counts_in_any_order_of_imports(imports, check, planning):
    output_of("-c", f"import {imports}\n{check}", DASK_ARRAY__QUERY_PLANNING=planning)
