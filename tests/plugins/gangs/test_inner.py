"""Inner gangs on a new cluster, whose workers have no client yet: each in its only free thread."""

from __future__ import annotations

import dask.array as da
import numpy as np

from dask_p2p import spmd
from tests.plugins.gangs.test_nesting import of_first, task, task_with_client

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


def test_sections_built_in_the_function_run(client):
    for make in (task, task_with_client):
        y = spmd(of_first(make), da.zeros(16, chunks=4))
        assert np.array_equal(y.compute(), np.full(16, 32.0))
