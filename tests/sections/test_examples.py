"""Methods that iterate, as users write them, against what is known of their results."""

from __future__ import annotations

from contextlib import ExitStack

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

from dask_p2p.sections.api import graph as arguments
from tests.docs.pages import DOCS, blocks_of
from tests.support import mostly_slow

_, *PROGRAMS = [
    block
    for block in blocks_of(DOCS / "how-to" / "solvers.md")
    if block.language == "python" and not block.not_run
]
CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
SOLVERS = ("heat", "wave", "derivative", "solve", "square_roots")


def result_of(program):
    """Run a program alone, as one copies it from the page: it checks its result."""
    names = {"__name__": "docs"}
    exec(compile(program.text, program.where, "exec"), names)
    return names["result"]


@pytest.fixture(scope="module")
def alone():
    """Results without a client: that of a test is made later, as it is for one test."""
    with dask.config.set(scheduler="threads"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "cluster_workers", list)
        return [result_of(program) for program in PROGRAMS]


def test_the_page_has_a_program_for_each(alone):
    assert len(PROGRAMS) == len(SOLVERS)
    for program, name in zip(PROGRAMS, SOLVERS, strict=True):
        assert f"def {name}(" in program.text


@pytest.mark.parametrize("ranks", mostly_slow([None, 1, 4], [4]))
def test_values_are_the_same_on_any_number_of_workers(client, alone, ranks, monkeypatch):
    """By default as many ranks as workers. Sums over ranks are in another order."""
    with ExitStack() as stack:
        if ranks == 1:
            cluster = LocalCluster(n_workers=1, dashboard_address=":0")
            stack.enter_context(Client(stack.enter_context(cluster)))
        elif ranks is not None:
            monkeypatch.setattr(arguments, "cluster_workers", lambda: [{"nthreads": 2}] * ranks)
        for program, name, wanted in zip(PROGRAMS, SOLVERS, alone, strict=True):
            result = result_of(program)
            if name in ("solve", "square_roots"):
                np.testing.assert_allclose(result, wanted, atol=1e-8)
            else:
                assert np.array_equal(result, wanted), name
