"""Messages of CuPy arrays between ranks: values, and that they go from GPU to GPU."""

from __future__ import annotations

import dask
import numpy as np
import pytest

from dask_p2p import PerRank, spmd
from tests.gpu.support import on_gpu
from tests.sections.support import nothing_is_left
from tests.support import die_once

pytestmark = pytest.mark.gpu(2)

X = np.zeros((2, 4))
TURNS = 20


def there_and_back(ctx, x, elements, has_out):
    """Send an array that changes right after each send; return wrong elements and downloads."""
    import cupy

    device, downloads = ctx.device, []
    original = device.to_host

    def noted(value):
        if device.holds(value):
            downloads.append(value.nbytes)
        return original(value)

    device.to_host = noted
    other, wrong = 1 - ctx.rank, cupy.zeros((), "i8")
    own, out = cupy.empty(elements), cupy.empty(elements) if has_out else None
    for turn in range(TURNS):
        own[...] = cupy.arange(elements) + 10 * turn + ctx.rank
        came = ctx.sendrecv(own, other, other, out=out)
        own[...] = -1
        wrong += (came != cupy.arange(elements) + 10 * turn + other).sum()
    del device.to_host
    return np.array([int(wrong), len(downloads)])


@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("elements", [1 << 13, 1 << 20, 10_000_019])
def test_arrays_go_from_gpu_to_gpu(client, elements, has_out):
    given = {"elements": elements, "has_out": has_out, "outputs": PerRank(np.zeros(2, int))}
    found = spmd(there_and_back, on_gpu(X, (1, 4)), **given)
    assert found.compute().tolist() == [[0, 0]] * 2
    nothing_is_left(client)


def test_without_ipc_they_go_through_host_memory(client):
    given = {"elements": 1 << 16, "has_out": False, "outputs": PerRank(np.zeros(2, int))}
    with dask.config.set({"p2p.transports.order": ["comm"]}):
        found = spmd(there_and_back, on_gpu(X, (1, 4)), **given).compute()
    assert found.tolist() == [[0, TURNS]] * 2


def exchange_all_kinds(ctx, x):
    """Exchange values of several kinds in several ways; return which of them are wrong."""
    import cupy

    other = 1 - ctx.rank
    of = [cupy.arange(60_000.0).reshape(200, 300) + rank for rank in range(2)]
    a, b = of[ctx.rank], of[other]
    value = {"c": a, "f": a.T, "part": (a[::2, 3:], np.arange(9)), "small": a[0, :2], "rank": 1}
    first, second = ctx.isend(value, other), ctx.isend(a.astype("c8"), other)
    got = ctx.recv(other)
    group = ctx.split(0, key=-ctx.rank)
    pairs = [
        (got["c"], b),
        (got["f"], b.T),
        (got["part"][0], b[::2, 3:]),
        (got["small"], b[0, :2]),
        (ctx.recv(other), b.astype("c8")),
        (ctx.bcast(a if ctx.rank else None, root=1), of[1]),
        *zip(ctx.alltoall([a, a]), of, strict=True),
        (group.sendrecv(a, 1 - group.rank, 1 - group.rank), b),
    ]
    first.wait()
    second.wait()
    same = [got["part"][1].tolist() == [*range(9)], got["rank"] == 1]
    same += [isinstance(one, cupy.ndarray) and bool((one == like).all()) for one, like in pairs]
    return np.array(same)


def test_values_of_all_kinds(client):
    found = spmd(exchange_all_kinds, on_gpu(X, (1, 4)), outputs=PerRank(np.zeros(11, bool)))
    assert found.compute().tolist() == [[True] * 11] * 2
    nothing_is_left(client)


def send_and_die_once(ctx, x, path):
    """Lose a rank that has begun to send; the next attempt sends all messages."""

    import cupy

    other, own = 1 - ctx.rank, cupy.full(1 << 20, ctx.rank + 1.0)
    for turn in range(10):
        if ctx.rank == turn % 2:
            sent = ctx.isend(own, other)
            if turn == 5:
                die_once(path)
            sent.wait()
        else:
            found = ctx.recv(other)
    return np.array(bool((found == other + 1).all()))


def test_a_lost_sender(client, tmp_path):
    path = str(tmp_path / "died")
    found = spmd(send_and_die_once, on_gpu(X, (1, 4)), path=path, outputs=PerRank(np.array(False)))
    assert found.compute().tolist() == [True, True]
    nothing_is_left(client)
