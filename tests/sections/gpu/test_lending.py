"""Arrays that GPUs lend each other: values, and the order of all accesses of memory."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest

from dask_p2p.plans import Fill, Piece
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.gpu import lending as module
from dask_p2p.sections.gpu.device import Gpu
from tests.sections.gangs import connections_of, run_gang
from tests.simulation.streams import RaceError

RANKS = RankGrid(((1, 1, 1),), (3,))
ROWS = 6
WIDTH = 24
#: A large piece, which is read part by part, and a small one.
PIECES = [
    Piece(0, ((0, ROWS), (0, 8)), ((8, 16), (0, ROWS))),
    Piece(0, ((2, 4), (8, 9)), ((3, 4), (1, 3))),
]

#: A large piece of the rank's own array.
OWN = [Piece(0, ((0, ROWS), (9, 15)), ((16, 22), (0, ROWS)))]


def values_of(rank, turn):
    return np.arange(ROWS * WIDTH, dtype=float).reshape(ROWS, WIDTH) + 1000 * rank + 10_000 * turn


def expected(rank, of, turn):
    """Return the block of a rank that has read the array of another one."""
    out = np.full((WIDTH, ROWS), -1.0)
    for owner, pieces in ((of, PIECES), (rank, OWN)):
        for _, src, dst in pieces:
            region = values_of(owner, turn)[tuple(slice(*each) for each in src)]
            out[tuple(slice(*each) for each in dst)] = region.T
    return out


def run(gpu, function, **kwargs):
    def rank_attempt(ctx):
        with ctx.device.running([]):
            function(ctx, ctx.device.lending(connections_of(ctx)))

    run_gang(RANKS, rank_attempt, device=partial(Gpu, part_bytes=512, **kwargs))
    gc.collect()
    gpu.check()


def exchanged(gpu, ctx, lending, source, turn):
    """Lend an array to the next rank, read that of the previous one; return the block."""
    to, of = (ctx.rank + 1) % 3, (ctx.rank - 1) % 3
    out = lending.backend.empty((WIDTH, ROWS), source.dtype)
    lending.fill(out, [Fill(((0, WIDTH), (0, ROWS)), -1.0)])
    lending.begin()
    descriptor = lending.descriptor(to, source)
    found = connections_of(ctx).exchange(f"turn {turn}", {to: descriptor or b""}, {of: None})
    if descriptor is None:
        assert not len(found[of])
        return None
    lending.copy_pieces(out, source, OWN, (1, 0))
    lending.read_pieces(of, bytes(found[of]), out, PIECES, (1, 0))
    lending.end(f"turn {turn}", [to], [of])
    return out


def test_arrays_are_read_before_they_change(gpu):
    def rank_attempt(ctx, lending):
        source = gpu.empty((ROWS, WIDTH), float)
        for turn in range(4):
            gpu.do(gpu.current[-1].name, "the function", writes=[source])
            source.values[...] = values_of(ctx.rank, turn)
            out = exchanged(gpu, ctx, lending, source, turn)
            assert lending.holds(out)
            np.testing.assert_array_equal(
                ctx.device.to_host(out), expected(ctx.rank, (ctx.rank - 1) % 3, turn)
            )

    run(gpu, rank_attempt)


@pytest.mark.parametrize("missing", ["wait for the writer", "wait for the readers"])
def test_a_missing_wait_is_found(gpu, monkeypatch, missing):
    number = module._WRITTEN if missing == "wait for the writer" else module._READ
    original = module.PeerMemory.wait
    monkeypatch.setattr(
        module.PeerMemory,
        "wait",
        lambda self, stream, event: None if event == number else original(self, stream, event),
    )
    with pytest.raises(RaceError):
        test_arrays_are_read_before_they_change(gpu)


def test_without_windows_bytes_are_sent(gpu):
    def rank_attempt(ctx, lending):
        source = gpu.empty((ROWS, WIDTH), float)
        assert exchanged(gpu, ctx, lending, source, 0) is None

    run(gpu, rank_attempt, has_windows=False)


def test_a_message_is_put_into_place(gpu):
    def rank_attempt(ctx, lending):
        out = lending.backend.empty((WIDTH, ROWS), np.dtype(float))
        lending.place(out, values_of(0, 0), (1, 0))
        np.testing.assert_array_equal(ctx.device.to_host(out), values_of(0, 0).T)

    run(gpu, rank_attempt)
