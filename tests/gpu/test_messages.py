"""Messages of CuPy arrays between ranks: values, and that they go from GPU to GPU."""

import numpy as np
import pytest

from dask_p2p import PerRank, spmd
from tests.backends.support import cupy
from tests.gpu.support import on_gpu
from tests.sections.support import nothing_is_left
from tests.support import die_once

pytestmark = pytest.mark.gpu(2)

X = np.zeros((2, 4))
TURNS = 20


def there_and_back(ctx, x, elements, has_out):
    """Send an array that changes right after each send; return wrong elements and downloads."""
    device, downloads = ctx.device, []
    original = device.to_host

    def noted(value):
        if device.holds(value):
            downloads.append(value.nbytes)
        return original(value)

    device.to_host = noted
    peer, wrong_count = 1 - ctx.rank, cupy.zeros((), "i8")
    block, out = cupy.empty(elements), cupy.empty(elements) if has_out else None
    for round_number in range(TURNS):
        block[...] = cupy.arange(elements) + 10 * round_number + ctx.rank
        received = ctx.sendrecv(block, peer, peer, out=out)
        block[...] = -1
        wrong_count += (received != cupy.arange(elements) + 10 * round_number + peer).sum()
    del device.to_host
    return np.array([int(wrong_count), len(downloads)])


@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("elements", [1 << 13, 1 << 20, 10_000_019])
def test_arrays_go_from_gpu_to_gpu(client, elements, has_out):
    options = {"elements": elements, "has_out": has_out, "outputs": PerRank(np.zeros(2, int))}
    actual = spmd(there_and_back, on_gpu(X, (1, 4)), **options)
    assert actual.compute().tolist() == [[0, 0]] * 2
    nothing_is_left(client)


def send_and_die_once(ctx, x, path):
    """Lose a rank that has begun to send; the next attempt sends all messages."""
    peer, block = 1 - ctx.rank, cupy.full(1 << 20, ctx.rank + 1.0)
    for round_number in range(10):
        if ctx.rank == round_number % 2:
            sent = ctx.isend(block, peer)
            if round_number == 5:
                die_once(path)
            sent.wait()
        else:
            received = ctx.recv(peer)
    return np.array(bool((received == peer + 1).all()))


def test_a_lost_sender(client, tmp_path):
    path = str(tmp_path / "died")
    actual = spmd(send_and_die_once, on_gpu(X, (1, 4)), path=path, outputs=PerRank(np.array(False)))
    assert actual.compute().tolist() == [True, True]
    nothing_is_left(client)
