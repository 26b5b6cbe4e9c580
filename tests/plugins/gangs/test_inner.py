"""Gangs that tasks compute, and that the function of another gang computes."""

from __future__ import annotations

import warnings

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import worker_client

from dask_p2p import spmd
from dask_p2p.errors import P2PWarning
from tests.support import own_client
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}
X = np.ones(16)


def double(ctx, x):
    return x * 2 + ctx.allreduce(0.0)


def inner(**kwargs):
    return spmd(double, da.from_array(X, chunks=4), **kwargs)


def total(**kwargs):
    return inner(**kwargs).sum().compute()


def total_with_client(**kwargs):
    with worker_client():
        return total(**kwargs)


@pytest.mark.parametrize("compute", [total, total_with_client])
def test_ordinary_tasks_may_compute_sections(client, compute):
    y = da.zeros(16, chunks=8).map_blocks(lambda x: x + compute(), dtype=float)
    np.testing.assert_array_equal(y.compute(), np.full(16, 32.0))


@pytest.mark.parametrize("compute", [total, total_with_client])
def test_a_section_of_one_rank_runs_in_the_function_of_another(client, compute):
    y = spmd(lambda ctx, x: x + compute(ranks=1), da.zeros(16, chunks=4))
    np.testing.assert_array_equal(y.compute(), np.full(16, 32.0))


def test_a_warning_names_the_section_whose_workers_an_inner_one_needs(monkeypatch):
    monkeypatch.setattr("dask_p2p.plugins.gangs.gathering.REMINDER_S", 0.5)
    with (
        dask.config.set({"p2p.sections.warn-after": "100 ms"}),
        warnings.catch_warnings(record=True) as records,
        own_client() as client,
    ):
        warnings.simplefilter("always", P2PWarning)
        section = inner()
        y = spmd(lambda ctx, x: x + section.sum().compute(), da.zeros(16, chunks=4))
        future = client.compute(y)
        text = "workers are still needed by p2p-spmd-ranks-"
        wait_until(lambda: any(text in str(record.message) for record in records))
        client.cancel(future)
