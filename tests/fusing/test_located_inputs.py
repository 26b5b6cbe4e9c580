"""Inputs of gangs that lie on workers in no order."""

import signal
from uuid import uuid4

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import futures_of, wait

import dask_p2p
from dask_p2p.fusing.planning.tasks import keys_of
from tests.fusing.support import smoothed
from tests.sections.support import nothing_is_left
from tests.support import result_of

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}


def values(shape, seed):
    return np.random.default_rng(seed).integers(-99, 99, shape) / 8  # sums are exact


def on_workers(client, holders, n=64, may_move=True):
    """An array whose blocks are on the workers with these numbers, if no task was stolen."""
    client.wait_for_workers(2)
    addresses, name, rows = sorted(client.nthreads()), f"placed-{uuid4().hex}", n // len(holders)
    options = {"allow_other_workers": may_move}
    blocks = {
        (name, i, 0): client.submit(
            values, (rows, n), i, key=(name, i, 0), workers=addresses[number], **options
        )
        for i, number in enumerate(holders)
    }
    wait([*blocks.values()])
    return da.Array(blocks, name, chunks=((rows,) * len(holders), (n,)), dtype=float)


def fetched(keys, dask_worker):
    """The blocks among some keys that this worker has received from others."""
    received = [key for entry in dask_worker.transfer_incoming_log for key in entry["keys"]]
    return [key for key in received if key in keys]


def program(x, y):
    return dask_p2p.transpose(smoothed(x) + 1) - y.sum(axis=0) * x


LAYOUTS = {
    "in order": ([0] * 4 + [1] * 4, None),
    "exchanged": ([1] * 4 + [0] * 4, None),
    "in no order": ([0, 1, 1, 0, 1, 0, 0, 1], None),
    "on one worker": ([1] * 8, None),
    "two inputs": ([0, 1] * 4, [1, 1, 0, 1, 1, 0, 0, 1]),
}


@pytest.mark.parametrize("option", ["fused", "two ranks a worker", "on"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_worker_fetches_inputs(client, layout, option):
    first, second = LAYOUTS[layout]
    x = on_workers(client, first)
    y = x if second is None else on_workers(client, second)
    of_inputs = program(x, y)
    with dask.config.set({"p2p.fuse": "on" if option == "on" else "off"}):
        ranks = 4 if option == "two ranks a worker" else None
        fused_array = of_inputs if option == "on" else dask_p2p.fused(of_inputs, ranks=ranks)
        computed = fused_array.compute()
    assert not any(client.run(fetched, {*keys_of(x), *keys_of(y)}).values())
    assert all(len(holders) == 1 for holders in client.who_has([*futures_of(x)]).values())
    rows = np.concatenate([values((8, 64), i) for i in range(8)])
    expected = program(da.from_array(rows, chunks=(8, 64)), da.from_array(rows, chunks=(8, 64)))
    assert computed.tobytes() == expected.compute(scheduler="sync").tobytes()


def test_inputs_that_are_lost_are_made_again(client):
    """Elsewhere than the programs expect them."""
    x = on_workers(client, [0, 1, 1, 0, 1, 0, 0, 1])
    expected, victim = program(x, x).compute(), min(client.nthreads())
    y = dask_p2p.fused(program(x, x))
    client.run(signal.raise_signal, signal.SIGKILL, workers=[victim], on_error="ignore")
    assert result_of(client, client.compute(y)).tobytes() == expected.tobytes()
    del x, y
    nothing_is_left(client)


def test_blocks_that_have_moved_since(client):
    """The programs differ, and so do the names of the ranks' tasks."""
    x = on_workers(client, [0, 1, 1, 0, 1, 0, 0, 1], may_move=False)
    before = dask_p2p.fused(program(x, x))
    assert before.name == dask_p2p.fused(program(x, x)).name
    client.replicate(futures_of(x), workers=[min(client.nthreads())])
    after = dask_p2p.fused(program(x, x))
    assert before.name != after.name
    expected = program(x, x).compute()  # moves blocks, too
    for computed in dask.compute(before, after):
        assert computed.tobytes() == expected.tobytes()
