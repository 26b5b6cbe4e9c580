"""Memory of failed tasks is freed, on a worker that never collects garbage."""

from __future__ import annotations

import gc
import os
import weakref
from traceback import extract_tb, format_exception

import dask.array as da
import numpy as np
import pytest
from distributed import get_worker

from dask_p2p import fused, iterate, map_overlap, spmd
from dask_p2p.engine.task import drops_frames
from dask_p2p.errors import BlockMismatchError, SectionError, TransferError, without_frames
from dask_p2p.geometry import block_bounds
from tests.support import result_of
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


def note(array):
    """Keep a weak reference to an array on its worker, and collect no garbage."""
    gc.disable()
    worker = get_worker()
    worker.noted = [*getattr(worker, "noted", ()), weakref.ref(array)]


def alive(dask_worker):
    noted = getattr(dask_worker, "noted", ())
    gone = all(ref() is None for ref in noted)
    return len(noted), gone


def check_all_is_gone(client):
    frames = {}

    def all_is_gone():
        frames.update(client.run(alive))
        assert sum(noted for noted, _ in frames.values()), "something was noted"
        return all(gone for _, gone in frames.values())

    wait_until(all_is_gone, state=lambda: frames)


def failing_rank(ctx, x):
    array = np.ones(1000)
    note(array)
    ctx.barrier()
    if ctx.rank == 1:
        raise ZeroDivisionError("on purpose")
    ctx.barrier()


def failing(block):
    array = block + 1
    note(array)
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize(
    "build",
    [
        lambda x: spmd(failing_rank, x, ranks=2),
        lambda x: map_overlap(failing, x, depth=1, boundary=0, meta=x._meta),
    ],
    ids=["a rank", "a task of a layer"],
)
def test_of_a_function_that_raises(client, build):
    future = client.compute(build(da.zeros((4, 1000), chunks=(2, 500))))
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        result_of(client, future)
    del future
    check_all_is_gone(client)


def test_of_a_rank_whose_peer_dies(client, tmp_path):
    def function(ctx, x, path):
        array = np.ones(1000)
        note(array)
        ctx.barrier()
        if ctx.rank == 1 and not path.exists():
            path.touch()
            os._exit(1)
        ctx.barrier()
        return x + 1

    y = spmd(function, da.zeros(4, chunks=2), ranks=2, path=tmp_path / "died")
    assert np.array_equal(y.compute(), np.ones(4))
    check_all_is_gone(client)


def raising():
    array = np.ones(3)
    reference = weakref.ref(array)
    try:
        try:
            raise OSError("cause")
        except OSError as exc:
            raise TransferError("failed") from exc
    except TransferError as exc:
        return exc, reference


def test_an_exception_that_is_kept_has_no_frames():
    exc, array = raising()
    assert array() is not None
    assert without_frames(exc) is exc
    assert array() is None
    assert str(exc) == "failed"
    assert exc.__traceback__ is exc.__cause__ is exc.__context__ is None


def lookup(settings):
    return settings["rate"]


def in_a_section(x):
    def program(ctx, x):
        ctx.barrier()
        return x * lookup({}) if ctx.rank else ctx.allreduce(x)

    return spmd(program, x, ranks=2)


def in_steps(x):
    return iterate(lambda u: {"u": lookup({})}, {"u": x}, 1, 3)["u"]


def in_halo(x):
    return map_overlap(lambda u: lookup({}), x, depth=1, boundary=0, meta=x._meta)


def in_a_gang(x):
    return fused(x.map_blocks(lambda u: lookup({}), meta=x._meta) + 1, ranks=2)


@pytest.mark.parametrize("build", [in_a_section, in_steps, in_halo, in_a_gang])
def test_the_traceback_has_the_frames_of_the_program(client, build):
    """And none of this package before them, on the client and in the logs of workers."""
    with pytest.raises(KeyError, match="rate") as raised:
        build(da.ones((4, 4), chunks=(2, 4))).compute()
    frames = extract_tb(raised.value.__traceback__)
    assert frames[-1].name == "lookup"
    assert not [frame for frame in frames if "/dask_p2p/" in frame.filename]
    assert "/dask_p2p/" not in "".join(format_exception(raised.value))


def test_an_error_about_the_program_has_no_other_frames(client):
    def differing(ctx, x):
        return x + (ctx.allreduce(1.0) if ctx.rank else ctx.barrier())

    x = da.ones((4, 4), chunks=(2, 4))
    with pytest.raises(SectionError) as raised:
        spmd(differing, x, ranks=2).compute()
    assert extract_tb(raised.value.__traceback__)[-1].name == "differing"
    with pytest.raises(BlockMismatchError) as raised:
        iterate(lambda u: u[5:], {"u": x}, 1, 3)["u"].compute()
    assert "/dask_p2p/" not in "".join(format_exception(raised.value))


def test_faults_of_this_package_keep_their_frames():
    """Their reports need all frames."""
    with pytest.raises(TypeError) as raised:
        drops_frames(block_bounds)(None)
    assert [frame.name for frame in extract_tb(raised.value.__traceback__)][1:] == [
        "run",
        "block_bounds",
    ]
