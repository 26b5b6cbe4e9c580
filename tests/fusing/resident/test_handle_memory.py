from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.errors import MemoryLimitError
from dask_p2p.fusing.planning.sizes import Declared
from dask_p2p.fusing.resident.client_streams import HandleMemory

RESULTS = [
    Declared("u", ((10, 20), (5,)), np.dtype(float), None),
    Declared("unknown", ((float("nan"),) * 2,), np.dtype(float), None),
]
OUTPUTS = [
    ((("u", 0, 0),), (("unknown", 0),)),
    ((("u", 1, 0),), (("unknown", 1),)),
]
LARGEST = 20 * 5 * 8  # bytes of the results of a call on rank 1


def ranks(*limits, same=False):
    return [("worker" if same else f"worker {n}", "", limit) for n, limit in enumerate(limits)]


def test_handles_that_fit_on_each_worker():
    memory = HandleMemory(RESULTS, OUTPUTS)
    limit = int(2 * LARGEST / 0.8)
    for _ in range(2):
        memory.check(ranks(limit, limit))
        memory.add_call()
    with pytest.raises(MemoryLimitError, match="worker 1") as caught:
        memory.check(ranks(limit, limit))
    assert caught.value.needed_bytes == 3 * LARGEST
    memory.check(ranks(0, 0))  # without limits
    memory.check([])  # before the ranks have begun
    memory.drop([0, 1])  # both results of the first call
    memory.check(ranks(limit, limit))


def test_ranks_of_one_worker():
    memory = HandleMemory(RESULTS, OUTPUTS)
    limit = int(LARGEST / 0.8)
    memory.check(ranks(limit, limit))
    with pytest.raises(MemoryLimitError):
        memory.check(ranks(limit, limit, same=True))
