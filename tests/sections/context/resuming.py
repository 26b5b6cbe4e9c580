"""Functions of two ranks whose attempt ends at a step, and that begin again with its state."""

from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.gang.checkpoints import Checkpoints, SavedStates, States
from tests.sections.gangs import run_gang


def first_step_again(function):
    """Check the values of a function that begins again; return its first step, or None."""
    ranks = RankGrid(((3, 3),), (2,))
    kept = [SavedStates(), SavedStates()]

    class FoundError(Exception):
        pass

    def attempt(resume, last=None):
        def checkpoints(rank, connections, device):
            own = States(kept[rank], "x", resume, (0, 1), lambda: None)
            made = Checkpoints(rank, ["a", "b"], connections, own, device)
            save = made.save

            def saved(step, arrays):
                save(step, arrays)
                if step == last:
                    connections.gather("the state of both is there", b"")
                    raise FoundError

            made.save = saved
            return made

        def call(ctx):
            made = function(ctx, np.arange(3.0))
            firsts.append(ctx.progress.first)
            return made

        return run_gang(ranks, call, checkpoints=checkpoints)

    firsts = []
    wanted = [[12, 13, 14]] * 2
    assert [found.tolist() for found in attempt(None)] == wanted
    if not kept[0].gangs:
        return None
    for each in kept:
        each.drop("x")
    with pytest.raises(FoundError):
        attempt(None, last=7)
    assert [found.tolist() for found in attempt(7)] == wanted
    return firsts[-1]
