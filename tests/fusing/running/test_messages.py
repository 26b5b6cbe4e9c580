import time
from collections import Counter

import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.fusing.planning.sizes import Superstep, WholeValue
from dask_p2p.fusing.running.assembling import Assembling
from dask_p2p.fusing.running.gang import ProgramContext
from dask_p2p.fusing.running.messages import Messages
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.exchange.device import Lending
from dask_p2p.sections.exchange.regions import Reads
from tests.fusing.support import check_blocks, run_programs
from tests.sections.gangs import run_gang
from tests.support import noted

RANKS = RankGrid(((1, 1),), (2,))
LARGE = np.arange(2.0**16).reshape(256, 256)
VALUES = {
    "scalar": np.float64(3),
    "number": 3.5,
    "dict": {"n": np.arange(3), "total": [1, None]},
    "0-d": np.array(7),
    "empty": np.zeros((0, 3), "f4"),
    "objects": np.array([1, "a", None], dtype=object),
    "columns": np.asfortranarray(LARGE[:5, :7]),
    "axes": np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
    "backwards": np.arange(5)[::-1],
    "rows": LARGE[::2, 3:20],
    "repeated": np.broadcast_to(np.arange(3.0), (4, 3)),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "large": LARGE,
    "large columns": np.asfortranarray(LARGE),
    "large rows backwards": LARGE[::-1, :200],
    "large, every other": LARGE[:, ::2],
}


@pytest.mark.parametrize("reads_memory", [True, False])
def test_whole_values(reads_memory):
    superstep = [
        Superstep(sends={1: [WholeValue(n) for n in VALUES]}),
        Superstep(receives={0: [WholeValue(n) for n in VALUES]}),
    ]

    def run(ctx):
        reads = Reads(ctx.connections, reads_memory)
        reads.try_all()
        values = dict(VALUES) if ctx.rank == 0 else {}
        assembling = Assembling([Lending(ctx.connections, reads)])
        Messages(ctx.connections, assembling).exchange(1, superstep[ctx.rank], values)
        return values

    _, results = run_gang(RANKS, run, context=ProgramContext)
    assert list(results) == list(VALUES)
    for name, value in VALUES.items():
        received = results[name]
        assert type(received) is type(value), name
        if not isinstance(value, np.ndarray):
            assert repr(received) == repr(value)
            continue
        assert received.dtype == value.dtype
        np.testing.assert_array_equal(received, value, strict=True)
        assert received.flags.writeable
        assert received is not value
        order = np.argsort([-abs(stride) for stride in value.strides], kind="stable")
        assert value.size < 2 or received.transpose(order).flags.c_contiguous or name == "objects"


@pytest.fixture
def reads(monkeypatch):
    """The number of reads of other ranks' memory by method. Each one comes late."""
    counts = Counter()
    for name in ("read", "read_bytes"):

        def count_late(*args, name=name):
            counts[name] += 1
            time.sleep(0.05)  # the owner would go on meanwhile

        noted(monkeypatch, Lending, name, count_late)
    return counts


@pytest.mark.parametrize(("rows", "read"), [(128, "read_bytes"), (256, "read")])
def test_an_array_is_kept_until_it_is_read(reads, rows, read):
    """Otherwise its memory would be overwritten by the next array of its size."""
    n = 2 * rows
    x = da.random.default_rng(0).normal(size=(n, n), chunks=(rows, n)) + 1
    y = dask_p2p.transpose(x)
    for _ in range(3):
        y = dask_p2p.transpose(y * 1.5)
    check_blocks([y], run_programs([y], 2))
    assert reads == {read: 8}


def test_small_arrays_are_read_eight_at_a_time(reads):
    """A read of one would take longer than the copies, and a read of all twice the memory."""
    x = da.random.default_rng(0).normal(size=(512, 512), chunks=(64, 512))
    y = dask_p2p.transpose(x + 1)
    check_blocks([y], run_programs([y], 2))
    assert reads == {"read_bytes": 4}  # by each rank: 16 arrays of 32 KiB, 256 KiB at a time
