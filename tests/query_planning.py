"""What must hold where arrays of `dask.array` are expressions; run by `test_expressions`.

They are where DASK_ARRAY__QUERY_PLANNING says so when it is imported.
"""

import importlib
import os
import tempfile
from contextlib import suppress

import dask
import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner

import dask_p2p
from dask_p2p.cli import p2p
from tests.graph.random_programs import check_program, doubled
from tests.support import indexed, own_client, persisted, spread, used


def check_random_programs():
    """Those whose functions Dask has for expressions."""
    checked = 0
    for seed in range(120):
        with suppress(NotImplementedError, AttributeError):
            check_program(da, seed)
            checked += 1
    assert checked >= 40


def check_composed(y, expected):
    """Check an array, and what Dask makes of it."""
    for result, values in (
        (y, expected),
        (y.sum(), expected.sum()),
        (y[:1], expected[:1]),
        (y.T + 1, expected.T + 1),
        (dask_p2p.rechunk(y, (-1, 5)), expected),
    ):
        np.testing.assert_allclose(result.compute(), values, rtol=1e-12)


def leapfrog(u, before, speed, out):
    out[:] = 2 * u[1:-1] - before + speed * (u[2:] - u[:-2])


def normalized(ctx, share):
    return share / ctx.allreduce(share.sum())


def summed(ctx, share):
    return share, share.sum()


def check_sections(da, ranks=1):
    """Of arrays of a library; on one worker, or on several."""
    array = indexed((8, 6)).astype(float)
    x = da.from_array(array, chunks=(2, 3))
    _, sums = dask_p2p.spmd(summed, x, ranks=ranks, per_rank=[0.0])
    assert sums.chunks == ((1,) * ranks,)
    assert sums.sum().compute() == array.sum()
    speed = da.from_array(array / 100, chunks=(4, 6))
    u, before = array + 1, array
    for _ in range(3):
        halo = np.pad(u, ((1, 1), (0, 0)), "wrap")
        u, before = 2 * u - before + array / 100 * (halo[2:] - halo[:-2]), u
    levels = dask_p2p.iterate(leapfrog, (x + 1, x), [{0: 1}, 0], 3, constants=(speed,), ranks=ranks)
    total = array / array.sum()
    for y, expected in (
        *zip(levels, (u, before), strict=True),
        (dask_p2p.spmd(normalized, x.rechunk((4, 3)), ranks=ranks), total),
        (dask_p2p.spmd(normalized, (x * 2)[:, ::-1], ranks=ranks), total[:, ::-1]),
    ):
        assert type(y) is da.Array
        assert dask_p2p.estimate(y).workers == ranks
        check_composed(y, expected)
    for y, level in zip(dask.compute(*levels), (u, before), strict=True):
        np.testing.assert_allclose(y, level, rtol=1e-14)
    gangs = {key[0] for y in levels for key in y.__dask_graph__() if "-ranks-" in str(key[0])}
    assert len(gangs) == 1, "both are made by the same members"


def check_fused(ranks):
    """On one worker, or on several."""
    array = indexed((16, 12)).astype(float)
    x = da.from_array(array, chunks=(4, 6))
    y = dask_p2p.map_overlap(doubled, x, depth=1, boundary="periodic", dtype=x.dtype)
    y = dask_p2p.transpose(y) - y.sum() / 8
    results = dask_p2p.fused(y, (y.rechunk((3, 16)) + 1)[2:], ranks=ranks)
    assert {type(z) for z in results} == {da.Array}
    expected = 2 * array.T - 2 * array.sum() / 8
    for z, a in zip(results, (expected, expected[2:] + 1), strict=True):
        assert {key[0] for key in z.__dask_graph__() if "p2p-fused-ranks" in str(key)}
        check_composed(z, a)
    for z, wanted in zip(dask.compute(*results), (expected, expected[2:] + 1), strict=True):
        np.testing.assert_array_equal(z, wanted)
    again = dask_p2p.fused(x.persist() * 2 + 1, ranks=ranks)
    np.testing.assert_array_equal(again.persist().compute(), 2 * array + 1)


def stencils(u):
    for _ in range(4):
        u = dask_p2p.map_overlap(doubled, u, depth={0: 1}, boundary="periodic", dtype=u.dtype)
    return u - u.sum() / 8


def check_compiled(ranks):
    """On one worker, or on several."""
    array = indexed((16, 12)).astype(float)
    x = da.from_array(array, chunks=(4, 6))
    compiled = dask_p2p.compile(lambda u: (stencils(u), (u.T + 1)[2:]), x, ranks=ranks)
    for argument, values in ((x * 2, array * 2), ((x - 1).persist(), array - 1)):
        expected = 16 * values - 16 * values.sum() / 8, values.T[2:] + 1
        for z, value in zip(compiled(argument), expected, strict=True):
            assert type(z) is da.Array
            np.testing.assert_array_equal((z + 1)[:3].compute(), value[:3] + 1)
        for z, expected_value in zip(dask.compute(*compiled(argument)), expected, strict=True):
            np.testing.assert_array_equal(z, expected_value)


def check_resident_and_option():
    array = indexed((16, 12)).astype(float)
    x = da.from_array(array, chunks=(4, 6))
    expected = stencils(x).compute()
    with dask_p2p.compile(stencils, x).resident(x) as run:
        y = run.array(run(x))
    assert type(y) is da.Array
    np.testing.assert_array_equal((y + 1).compute(), expected + 1)
    assert dask_p2p.explain(stencils(x)).startswith("by one gang: ")
    with dask.config.set({"p2p.fuse": "on"}):
        np.testing.assert_array_equal(stencils(x).compute(), expected)
        (run,) = [record for record in dask_p2p.last_runs() if record.operation == "p2p-fused"][:1]
        results = dask.compute(stencils(x) * 3, x + 1)
        persisted = (stencils(x) - 1).persist()
        np.testing.assert_array_equal(stencils(x).compute(scheduler="sync"), expected)
    assert run.steps > 1
    np.testing.assert_array_equal(results[0], expected * 3)
    np.testing.assert_array_equal(results[1], array + 1)
    np.testing.assert_array_equal(persisted.compute(), expected - 1)


def check_groups(da):
    array = indexed((64, 48))
    with dask.config.set({"p2p.groups": 3}):
        y = dask_p2p.transpose(da.from_array(array, chunks=(4, 48)), chunks=(3, -1))
    assert y.numblocks == (16, 1)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), array.T)
    assert y.sum().compute(scheduler="sync") == array.sum()


def check_only_what_is_needed_runs(da):
    ran = []

    def record_block(block):
        ran.append(block.shape)
        return block

    x = da.from_array(indexed((8, 8)), chunks=(2, 8)).map_blocks(record_block, dtype="i8")
    by_columns = dask_p2p.rechunk(x, (4, -1))
    halo = dask_p2p.map_overlap(lambda block: block, x, 1, dtype="i8")
    for y, blocks in ((by_columns[:2], 2), (halo[:1], 2), (halo[:3], 3), (by_columns, 4)):
        ran.clear()
        y.compute(scheduler="sync")
        assert len(ran) == blocks, (y, ran)


def computed(y):
    """Values of an array by every way to compute it, and by what is made of it later."""
    yield "compute", y.compute()
    yield "persist", y.persist().compute()
    yield "optimize", y.optimize().compute()
    yield "dask.compute", dask.compute(y, y + 1)[0]
    yield "added", (y + 1).compute() - 1
    yield "transposed", y.T.compute().T
    yield "cut again", y.rechunk((5, 7), method="tasks").compute()
    yield "sliced", np.concatenate([y[:3].compute(), y[3:].compute()])


def rechunked_while_installed():
    """Arrays by name, each of which Dask alone would refuse to compute."""
    array = indexed((64, 48))
    x = da.from_array(array, chunks=(8, -1))
    by_method = {"array.rechunk.method": "p2p"}
    with dask_p2p.install() as used:
        results = {
            "method": x.rechunk((-1, 6), method="p2p"),
            "function": da.rechunk(x + 0, {1: 6}, method="p2p"),
            "balanced": x.rechunk((-1, 10), balance=True, method="p2p"),
            "of the same chunks": x.rechunk(x.chunks, balance=True, method="p2p"),
            "twice": x.rechunk((-1, 6), method="p2p").rechunk((6, -1), method="p2p"),
        }
        with dask.config.set(by_method):
            results["option"] = x.rechunk((-1, 6))
            results["size in bytes"] = x.rechunk("auto", block_size_limit=1000)
    assert used.counts == {"rechunk": 7}, used
    return array, results


def check_computed_after_uninstalling():
    array, results = rechunked_while_installed()
    for name, y in results.items():
        for way, values in computed(y):
            np.testing.assert_array_equal(values, array, f"{name} {way}")
    assert results["balanced"].numblocks == (1, 5)
    dask_p2p.install()
    rechunked = results["option"].T.rechunk((6, -1), method="p2p")
    dask_p2p.uninstall()
    np.testing.assert_array_equal(rechunked.compute(), array.T)
    # The method is that of the call: without a client tasks, and with one this package.
    x = da.from_array(array, chunks=(8, -1))
    with dask_p2p.install() as used:
        early = x.rechunk((16, -1)) + 1
    assert not used.count
    with own_client():
        assert not is_ours(early)
        np.testing.assert_array_equal(early.compute(), array + 1)
        with dask_p2p.install() as used:
            late = x.rechunk((-1, 6)) + 1
        assert used.count == 1
        np.testing.assert_array_equal(late.compute(), array + 1)
    with dask.config.set({"array.rechunk.method": "p2p"}):
        np.testing.assert_array_equal(early.compute(), array + 1)


def check_installed(client):
    """Where Dask's own way is not implemented."""
    array = indexed((64, 48))
    x = da.from_array(array, chunks=(8, -1))
    with dask_p2p.install() as used:
        y = x.T.rechunk((6, -1), method="p2p") + 1
        np.testing.assert_array_equal(y.compute(), array.T + 1)
        np.testing.assert_array_equal(x.map_overlap(np.negative, 1).compute(), -array)
        assert used.counts == {"rechunk": 1, "map_overlap": 1}
        prefixes = client.run_on_scheduler(lambda dask_scheduler: {*dask_scheduler.task_prefixes})
        assert {"p2p-rechunk", "p2p-overlap"} <= prefixes
        assert not is_ours(x.rechunk((-1, 6), method="tasks"))
    with dask_p2p.install() as used:
        np.testing.assert_array_equal(da.map_overlap(np.sqrt, x, depth=1).compute(), array**0.5)
        transforms = importlib.import_module("dask.array.fft")  # `da.fft` may be the function
        np.testing.assert_allclose(transforms.fft2(x).compute(), np.fft.fft2(array), atol=1e-6)
    assert used.counts == {"map_overlap": 1, "fft": 1}
    with pytest.raises(NotImplementedError):  # Dask has no way of its own
        x.rechunk((-1, 6), method="p2p").compute()


def is_ours(y):
    """Whether tasks of this package make an array, or what it is made of."""
    return any(str(key[0]).startswith("p2p-") for key in y.optimize().__dask_graph__())


def check_cluster():
    array = indexed((400, 300))
    with own_client() as client:
        x = spread(client, da.from_array(array, chunks=(100, 300)) + 0)
        lazy = dask_p2p.transpose(x)
        np.testing.assert_array_equal(persisted(client, lazy).compute(), array.T)
        assert used(client, lazy), "whole blocks were moved in place of regions"
        for operation in (
            lambda x: dask_p2p.rechunk(x, (-1, 100)),
            lambda x: dask_p2p.map_overlap(np.negative, x, 1),
        ):
            lazy = operation(x)
            np.testing.assert_array_equal(abs(persisted(client, lazy)).compute(), array)
            assert used(client, lazy), "whole blocks were moved in place of regions"
        check_sections(da, ranks=2)
        check_fused(ranks=2)
        check_compiled(ranks=2)
        check_resident_and_option()
        check_installed(client)
        check_files(client.cluster, array)


def check_files(cluster, array):
    with tempfile.TemporaryDirectory() as folder:
        source, target = (os.path.join(folder, name) for name in ("in.npy", "out.npy"))
        np.save(source, array)
        arguments = ["transpose", source, target, "--scheduler", cluster.scheduler_address]
        result = CliRunner().invoke(p2p, arguments)
        assert result.exit_code == 0, result.output
        np.testing.assert_array_equal(np.load(target), array.T)


if __name__ == "__main__":
    check_random_programs()
    check_sections(da)
    check_fused(ranks=1)
    check_compiled(ranks=1)
    check_groups(da)
    check_only_what_is_needed_runs(da)
    check_computed_after_uninstalling()
    check_cluster()
