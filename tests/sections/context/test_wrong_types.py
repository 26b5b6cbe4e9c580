"""Arguments of the context's methods of other types than the declared ones."""

from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.errors import InputError

X = np.ones(3)  # the local block of the only rank
#: Values that Python compares, iterates or hashes in different ways.
OTHERS = [1.5, object(), np.zeros(2), ["x", None], {"a": 1}, lambda: 1, 1j]


def stepped(ctx, **options):
    return [*ctx.steps(1, **options)]


CALLS = {
    "dest": lambda ctx, wrong: ctx.send(1, wrong),
    "source": lambda ctx, wrong: ctx.recv(wrong),
    "tag": lambda ctx, wrong: ctx.send(1, None, wrong),
    "root of bcast": lambda ctx, wrong: ctx.bcast(1, wrong),
    "root of gather": lambda ctx, wrong: ctx.gather(1, wrong),
    "root of reduce": lambda ctx, wrong: ctx.reduce(1, root=wrong),
    "op": lambda ctx, wrong: ctx.allreduce(1, wrong),
    "color": lambda ctx, wrong: ctx.split(wrong),
    "key": lambda ctx, wrong: ctx.split(0, wrong),
    "axis": lambda ctx, wrong: ctx.along(wrong),
    "corners": lambda ctx, wrong: ctx.with_halo(X, corners=wrong),
    "dtype": lambda ctx, wrong: ctx.with_halo(X, dtype=wrong),
    "exchange": lambda ctx, wrong: ctx.with_halo(X, exchange=wrong),
    "grid": lambda ctx, wrong: ctx.with_halo(X, grid=wrong),
    "copy": lambda ctx, wrong: ctx.update_halo(ctx.with_halo(X), copy=wrong),
    "zeros": lambda ctx, wrong: ctx.grid_of().zeros(wrong),
    "factor": lambda ctx, wrong: ctx.grid_of().coarser(wrong),
    "points": lambda ctx, wrong: ctx.points(wrong),
    "partition": lambda ctx, wrong: ctx.redistribute(X, wrong),
    "shape": lambda ctx, wrong: ctx.redistribute(X, shape=wrong),
    "count": lambda ctx, wrong: [*ctx.steps(wrong)],
    "state": lambda ctx, wrong: stepped(ctx, state=wrong),
    "every": lambda ctx, wrong: stepped(ctx, every=wrong),
    "checkpoint": lambda ctx, wrong: stepped(ctx, state=ctx.state(x=X), checkpoint=wrong),
    "save": lambda ctx, wrong: stepped(ctx, state=ctx.state(x=X), save=wrong),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_other_types_are_refused(alone, name):
    for wrong in OTHERS:
        with pytest.raises(InputError, match=r"expected .* got "):
            CALLS[name](alone, wrong)
