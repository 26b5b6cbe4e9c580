"""Resident gangs on a cluster with Dask's default settings, as one uses them."""

import pickle

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait
from distributed.utils_test import captured_logger
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import InputError, MemoryLimitError, SectionError, UnsupportedArrayError
from dask_p2p.fusing.resident.commands import CommandQueues
from tests.fusing.programs import array, same_bits
from tests.fusing.support import OPERATIONS, integers, smoothed
from tests.sections.support import nothing_is_left
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


def queues_on(dask_worker):
    """Return the number of ranks of resident gangs on a worker."""
    plugin = dask_worker.plugins.get(PLUGIN_NAME)
    part = plugin and plugin._parts.get(CommandQueues)
    return len(part._queues) if part else 0


def no_rank_is_left(client):
    wait_until(lambda: not any(client.run(queues_on).values()))
    nothing_is_left(client)


def repeated(function, u, steps):
    for _ in range(steps):
        u = function(u)
    return u


def add_to_total(u, total):
    total += 1
    return u + total


def test_functions_that_overwrite_constants(client):
    """Each call finds the constants of the graph as they were."""
    total = da.from_array(np.zeros((4, 3)), chunks=(2, 3))
    u = da.zeros((4, 3), chunks=(2, 3)).persist()
    step = dask_p2p.compile(lambda u: da.map_blocks(add_to_total, u, total, dtype=float), u)
    with step.resident(u) as run:
        for calls in range(1, 4):
            u = run(u)
            np.testing.assert_array_equal(run.fetch(u), np.full((4, 3), calls))
    no_rank_is_left(client)


@pytest.mark.parametrize("value", [0, 1])
def test_results_without_axes(client, value):
    """Dask's function that joins blocks takes a number of zero for an array without elements."""
    u = da.full((4, 3), value, chunks=(2, 3), dtype=float).persist()
    step = dask_p2p.compile(lambda u: (u.sum(), u.any(), u[1, 2], u.T.rechunk((3, 2)).max()), u)
    with step.resident(u) as run:
        for handle, expected in zip(run(u), step(u), strict=True):
            fetched, expected_values = run.fetch(handle), expected.compute()
            assert type(fetched) is type(expected_values)
            assert fetched == expected_values
            assert run.array(handle).compute() == expected_values


@pytest.mark.parametrize("chunks", [(2, 3), (4, 6)])
def test_workers_in_this_process(chunks):
    values = np.arange(24.0).reshape(4, 6)
    options = {"processes": False, "threads_per_worker": 2, "dashboard_address": None}
    with LocalCluster(n_workers=2, **options) as cluster, Client(cluster):
        u = da.from_array(values, chunks=chunks).persist()
        with dask_p2p.compile(lambda u: (u * 2, u.T), u).resident(u) as run:
            doubled, transposed = run(u)
            fetched = run.fetch(transposed)  # blocks of both ranks by turns
            np.testing.assert_array_equal(fetched, values.T)
            fetched[...] = 0  # this array alone
            np.testing.assert_array_equal(run.fetch(run(doubled)[1]), values.T * 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning")  # of few rows
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=4), st.integers(0, 99))
def test_random_functions(client, operations, number):
    """Results have the chunks of the argument, and are on the same ranks."""

    def function(u):
        for operation in operations:
            u = operation(u, u[::-1] * 0.5, number)
        return u.rechunk(x.chunks)

    x = array(24, 5)
    with dask_p2p.compile(function, x).resident(x) as run:
        fetched = run.fetch(repeated(run, x, 3))
    assert same_bits(fetched, repeated(function, x, 3).compute())


def test_several_arguments_and_results(client):
    def products(u, v):
        return u - v.T, (integers(u) @ integers(v)).sum(axis=0), u.sum(), u

    x, y = array(), array(rows=48).rechunk((48, 6))
    with dask_p2p.compile(products, x, y).resident(x, y) as run:
        u, columns, total, same = run(x, y)
        u2, *_ = run(u, y)
        u3, *_ = run(same, y)
        fetched = [*map(run.fetch, (u, columns, total, same, u2, u3))]
        arrays = [*map(run.array, (columns, total))]
    first = products(x, y)
    expected = [*first, products(first[0], y)[0], first[0]]
    for one, expected_value in zip(fetched, expected, strict=True):
        assert same_bits(one, expected_value.compute())
    for computed, lazy in zip(arrays, first[1:3], strict=True):
        assert same_bits(computed.compute(), lazy.compute())


def test_lazy_arguments_that_were_persisted_before(client):
    """Dask warns of tasks that differ under one key: it fuses those of `persist`."""
    x = array() * 2
    total = (x * x).sum()
    step = dask_p2p.compile(lambda u, v: u + v, x, total)
    expected = (x + total).compute()
    with captured_logger("distributed.scheduler", level="WARNING") as log:
        for _ in range(3):
            persisted = dask.persist(x, total)
            wait(persisted)
            del persisted
            with step.resident(x, total) as run:
                assert same_bits(run.fetch(run(x, total)), expected)
    assert "run_spec" not in log.getvalue()


def test_other_arguments_than_those_of_compile(client):
    x = array()
    step = dask_p2p.compile(lambda u: (u + 1, u.T.rechunk((12, 24)), u.astype("f4")), x)
    with pytest.raises(InputError, match="argument 0: expected the chunks of the example"):
        step.resident(x.rechunk(12))
    run = step.resident(x)
    with pytest.raises(InputError, match=r"with step\.resident"):
        run(x)
    with run, step.resident(x) as second_run:
        u, turned, small = run(x)
        for call, arguments, words in (
            (run, (u, u), "expected 1 arguments, as in compile, got 2"),
            (run, (turned,), "argument 0: expected the chunks of the example"),
            (run, (small,), r"argument 0: expected the dtype .* float32"),
            (second_run, (u,), "handle of this resident gang"),
            (second_run.fetch, (u,), "handle of this resident gang"),
            (run, (x + 1,), "got another Dask array"),
            (run, (np.ones((48, 48)),), "expected a handle, got ndarray"),
            (run.fetch, (x,), "Call its compute"),
        ):
            with pytest.raises(InputError, match=words):
                call(*arguments)
        assert same_bits(run.fetch(run(u)[0]), (x + 1 + 1).compute())
    with pytest.raises(SectionError, match="has ended"):
        run(x)
    with pytest.raises(SectionError, match="has ended"):
        run.fetch(u)
    with pytest.raises(InputError, match="it begins once"), run:
        pass
    del u, turned, small, second_run, call, arguments
    no_rank_is_left(client)


def test_a_handle_is_no_array(client):
    x = array()
    with dask_p2p.compile(smoothed, x).resident(x) as run:
        u = run(x)
        with pytest.raises(InputError, match=r"run\.fetch"):
            np.asarray(u)
        with pytest.raises(InputError, match=r"run\.array"):
            pickle.dumps(u)
        for use in (lambda: u.mean(), lambda: x + u):
            with pytest.raises(AttributeError, match=r"got a handle .* Call run\.array"):
                use()
        with pytest.raises(UnsupportedArrayError, match=r"Pass run\.array\(x\)"):
            dask_p2p.fused(u)
        with pytest.raises(InputError, match=r"expected a handle, got tuple\. Give"):
            run.fetch((u, u))
        operators = (lambda u: u < 1e-6), (lambda u: 2 * u), (lambda u: u[0])
        for use in (float, int, bool, list, len, *operators):
            with pytest.raises(InputError, match=r"got a handle .* Call run\.fetch\(handle\)"):
                use(u)
        assert repr(u) == "<handle of a resident gang, shape (48, 48), float64>"


def test_without_a_cluster():
    step = dask_p2p.compile(smoothed, array())
    with pytest.raises(InputError, match="expected a synchronous client"):
        step.resident(array())


def test_a_gang_that_is_dropped_ends(client):
    x = array()
    run = dask_p2p.compile(smoothed, x).resident(x)
    u = run.__enter__()(x)
    run.fetch(u)
    del run, u
    no_rank_is_left(client)


def test_a_client_that_is_closed_ends_its_gang(cluster, client):
    with Client(cluster, set_as_default=False) as second_client, second_client.as_current():
        x = array()
        run = dask_p2p.compile(smoothed, x).resident(x)
        run.__enter__().fetch(run(x))
        assert sum(client.run(queues_on).values())
    no_rank_is_left(client)
    with pytest.raises(SectionError, match=r"has ended|cancelled"):
        run(x)


def test_other_work_of_dask_runs_in_between(client):
    x = array()
    step = dask_p2p.compile(smoothed, x)
    with step.resident(x) as run:
        u = run(x)
        for _ in range(3):
            assert client.gather(client.map(lambda k: k + 1, range(20), pure=False))[-1] == 20
            y = run.array(u)
            assert same_bits(dask_p2p.transpose(y).compute(), y.compute().T)
            for result in (dask_p2p.fused(smoothed(y)), step(y)):  # gangs
                assert same_bits(result.compute(), smoothed(y).compute())
            with step.resident(y) as inner:
                assert same_bits(inner.fetch(inner(y)), smoothed(y).compute())
            u = run(u)
        assert same_bits(run.fetch(u), smoothed(x, 4).compute())


def positive(block, block_info=None):
    """Return a block, or raise an error in the last one if it has a negative number."""
    if block.size and block_info and block_info[0]["chunk-location"][0] == 7 and block.min() < 0:
        raise ArithmeticError(f"found {block.min()}")
    return block


def test_a_call_that_fails(client):
    def function(u, v):
        checked = u.map_blocks(positive, meta=u._meta)
        turned = dask_p2p.transpose(checked).rechunk(u.chunks)  # of regions
        return turned - v, checked.sum(), u + 1

    x, v = abs(array()) + 1, array() * 0 + 0.25
    with dask_p2p.compile(function, x, v).resident(x, v) as run:
        good, total, third_handle = run(x, v)
        low = run(x, third_handle)[0]  # negative numbers
        bad, bad_total, fine = run(low, v)  # call 3 fails
        worse, *_ = run(bad, v)
        again, again_total, _ = run(good, v)
        for handle in (bad, bad_total, worse):
            for read in (run.fetch, run.array):
                with pytest.raises(ArithmeticError, match="found -") as caught:
                    read(handle)
                notes = "".join(caught.value.__notes__)
                assert "In call 3 of a resident gang." in notes
                assert "In task ('positive" in notes
                assert "Raised on rank 1" in notes
        handles = good, total, third_handle, low, fine, again, again_total
        fetched = [*map(run.fetch, handles)]
        del bad, bad_total, worse, caught, handles
    first = function(x, v)
    expected = [*first, function(x, first[2])[0]]
    expected += [function(expected[3], v)[2], *function(first[0], v)[:2]]
    for one, expected_value in zip(fetched, expected, strict=True):
        assert same_bits(one, expected_value.compute())
    no_rank_is_left(client)


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(3)], ids=repr)
def test_an_exit_in_a_call_ends_no_gang(client, error):
    def leaving(block, block_info=None):
        if block_info and block.min() < 0:
            raise error
        return block

    x = abs(array())
    with dask_p2p.compile(lambda u: u.map_blocks(leaving, meta=u._meta) - 9, x).resident(x) as run:
        low = run(x)
        exited = run(low)
        later_handle = run(x)
        with pytest.raises(SectionError, match=f"raised {type(error).__name__}: 3") as caught:
            run.fetch(exited)
        notes = "".join(caught.value.__notes__)
        assert "In call 2 of a resident gang." in notes
        assert "In task ('leaving" in notes
        assert "in leaving" in notes  # the traceback
        assert same_bits(run.fetch(later_handle), (x - 9).compute())
        del caught
    no_rank_is_left(client)


def test_handles_that_do_not_fit(client):
    x = array()
    with dask_p2p.compile(lambda u: u + 1, x).resident(x) as run:
        u = first = run(x)
        run.fetch(u)
        streams = run._streams
        # Room for two arrays on each worker, and a half.
        streams.ranks = [(*rank, int(2.5 * x.nbytes / 2 / 0.8)) for *rank, _ in streams.ranks]
        u = run(u)
        with pytest.raises(MemoryLimitError, match="Drop handles that are not needed"):
            run(u)
        del first
        u = run(u)
        assert same_bits(run.fetch(u), repeated(lambda u: u + 1, x, 3).compute())


def test_blocks_on_workers_stay_as_they_are(client):
    """A result may be the block of an argument itself."""
    x = client.persist(array())
    wait(x)
    step = dask_p2p.compile(lambda u: (u, u + 1), x)
    with step.resident(x) as run:
        same, later_handle = run(x)
        same, _ = run(same)
        y = run.array(same)
        run.fetch(same)[:] = 0
        assert same_bits(run.fetch(same), array().compute())
        assert same_bits(run.fetch(later_handle), (array() + 1).compute())
    assert same_bits(y.compute(), x.compute())
    assert isinstance(y, da.Array)
    with pytest.raises(UnsupportedArrayError):
        step.resident(x.compute())
