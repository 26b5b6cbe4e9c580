"""What must hold where arrays are expressions; run by `test_expression` in a process of its own."""

from __future__ import annotations

import os
import tempfile

import dask
import dask.array as da
import numpy as np
from click.testing import CliRunner
from distributed import Client, LocalCluster

import dask_p2p
from dask_p2p.cli import p2p
from tests.support import indexed, persisted, used


def composed(x, y):
    """Results of common operations by name, of Dask arrays or of NumPy's."""
    return {
        "sum": y.sum(),
        "mean of an axis": y.mean(axis=0),
        "slice": y[1:5, 2:],
        "transposed": y.T,
        "added to the lazy transpose, of other chunks": x.T + y,
        "subtracted from it": (x.T - y)[2:],
    }


def check_values():
    array = indexed((6, 10))
    x = da.from_array(array, chunks=(2, 10))
    y = dask_p2p.transpose(x)
    assert type(y) is type(x) is da.Array
    assert y.chunks == ((4, 3, 3), (6,))
    assert y.dtype == array.dtype
    expected = composed(array, array.T)
    for name, result in composed(x, y).items():
        np.testing.assert_array_equal(result.compute(), expected[name], name)
    # Dask plans what comes before, and what comes after.
    again = dask_p2p.transpose((x + 1).rechunk((3, 4)), chunks=(5, -1)).rechunk((4, 4)) * 2
    np.testing.assert_array_equal(again.compute(), (array.T + 1) * 2)
    np.testing.assert_array_equal(dask_p2p.transpose(y.persist()).compute(), array)
    assert dask_p2p.transpose(x.max()).compute() == 59
    empty = dask_p2p.transpose(da.zeros((3, 0), chunks=2))
    assert empty.compute().shape == (0, 3)


def check_cluster():
    array = indexed((400, 300))
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        x = persisted(client, da.from_array(array, chunks=(100, 300)) + 0)
        lazy = dask_p2p.transpose(x)
        np.testing.assert_array_equal(persisted(client, lazy).compute(), array.T)
        assert used(client, lazy), "whole blocks were moved in place of regions"
        expected = composed(array, array.T)
        results = dask.compute(composed(x, lazy))[0]
        for name, result in results.items():
            np.testing.assert_array_equal(result, expected[name], name)
        check_files(cluster, array)


def check_files(cluster, array):
    with tempfile.TemporaryDirectory() as folder:
        source, target = (os.path.join(folder, name) for name in ("in.npy", "out.npy"))
        np.save(source, array)
        arguments = ["transpose", source, target, "--scheduler", cluster.scheduler_address]
        result = CliRunner().invoke(p2p, arguments)
        assert result.exit_code == 0, result.output
        np.testing.assert_array_equal(np.load(target), array.T)


if __name__ == "__main__":
    check_values()
    check_cluster()
