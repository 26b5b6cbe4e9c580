"""Methods that iterate, as users write them, against what is known of their results."""

from __future__ import annotations

from contextlib import ExitStack

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

from dask_p2p.sections.api import graph as arguments
from tests.docs.pages import DOCS, run_program
from tests.support import mostly_slow

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
#: By name of a program of the gallery: whether it sums over ranks, in another order on each number.
PROGRAMS = {
    **dict.fromkeys(("heat", "acoustic", "derivatives"), False),
    **dict.fromkeys(("conjugate_gradients", "small_systems"), True),
}


def result_of(program):
    return run_program(DOCS / "gallery" / f"{program}.py")


@pytest.fixture(scope="module")
def alone():
    """Results without a client: that of a test is made later, as it is for one test."""
    with dask.config.set(scheduler="threads"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "cluster_workers", list)
        return [result_of(program) for program in PROGRAMS]


@pytest.mark.parametrize("ranks", mostly_slow([None, 1, 4], [4]))
def test_values_are_the_same_on_any_number_of_workers(client, alone, ranks, monkeypatch):
    """By default as many ranks as workers. Sums over ranks are in another order."""
    with ExitStack() as stack:
        if ranks == 1:
            cluster = LocalCluster(n_workers=1, dashboard_address=":0")
            stack.enter_context(Client(stack.enter_context(cluster)))
        elif ranks is not None:
            monkeypatch.setattr(arguments, "cluster_workers", lambda: [{"nthreads": 2}] * ranks)
        for (program, has_sums), expected in zip(PROGRAMS.items(), alone, strict=True):
            if has_sums:
                np.testing.assert_allclose(result_of(program), expected, atol=1e-8)
            else:
                assert np.array_equal(result_of(program), expected), program
