"""Arrays that GPUs lend each other: values, and the order of all accesses of memory."""

from __future__ import annotations

import numpy as np

from dask_p2p.plans import Fill, Piece
from dask_p2p.plans.ranks import RankGrid
from tests.sections.emulated import run_on_gpus
from tests.sections.gangs import connections_of
from tests.support import tune

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


def values_of(rank, round_number):
    first = 1000.0 * rank + 10_000 * round_number
    return np.arange(first, first + ROWS * WIDTH).reshape(ROWS, WIDTH)


def expected(rank, source_rank, round_number):
    """Return the block of a rank that has read the array of another one."""
    out = np.full((WIDTH, ROWS), -1.0)
    for owner, pieces in ((source_rank, PIECES), (rank, OWN)):
        for _, src, dst in pieces:
            region = values_of(owner, round_number)[tuple(slice(*bounds) for bounds in src)]
            out[tuple(slice(*bounds) for bounds in dst)] = region.T
    return out


def run(gpu, function, **kwargs):
    def with_lending(ctx):
        function(ctx, ctx.device.lending(connections_of(ctx)))

    run_on_gpus(gpu, RANKS, with_lending, part_bytes=512, **kwargs)


def exchanged(gpu, ctx, lending, source, round_number, to, source_rank):
    """Lend an array to a rank, read that of another one; return the block."""
    out = lending.backend.empty((WIDTH, ROWS), source.dtype)
    lending.fill(out, [Fill(((0, WIDTH), (0, ROWS)), -1.0)])
    lending.begin([to])
    descriptor = lending.descriptor(to, source)
    descriptors = connections_of(ctx).exchange(
        f"turn {round_number}", {to: descriptor or b""}, {source_rank: None}
    )
    if descriptor is None:
        assert not len(descriptors[source_rank])
        return None
    lending.received([source_rank])
    lending.copy_pieces(out, source, OWN, (1, 0))
    lending.read_pieces(source_rank, bytes(descriptors[source_rank]), out, PIECES, (1, 0))
    lending.end(f"turn {round_number}", [to], [source_rank])
    return out


def test_bytes_of_several_exchanges_add_up(gpu, monkeypatch):
    """The readers never send a message. Each rank lends to the next one."""
    tune(monkeypatch, lent_bytes=3 * ROWS * WIDTH * 8)
    lent = []

    def rank_attempt(ctx, lending):
        source, pairs = None, []
        to, source_rank = (ctx.rank + 1) % 3, (ctx.rank - 1) % 3
        for round_number in range(6):
            if source is None or lending.is_lent(source):
                source = gpu.empty((ROWS, WIDTH), float)  # the memory may come from earlier turns
            gpu.do(gpu.current[-1].name, "the function", writes=[source])
            source.values[...] = values_of(ctx.rank, round_number)
            out = exchanged(gpu, ctx, lending, source, round_number, to, source_rank)
            assert lending.holds(out)
            pairs.append((out, expected(ctx.rank, source_rank, round_number)))
            lent.append(lending.is_lent(source))
        for out, expected_block in pairs:  # not before, since the host would wait
            np.testing.assert_array_equal(ctx.device.to_host(out), expected_block)

    run(gpu, rank_attempt)
    assert 2 * lent.count(False) == lent.count(True)


def test_without_windows_bytes_are_sent(gpu):
    def rank_attempt(ctx, lending):
        source = gpu.empty((ROWS, WIDTH), float)
        assert (
            exchanged(gpu, ctx, lending, source, 0, (ctx.rank + 1) % 3, (ctx.rank - 1) % 3) is None
        )

    run(gpu, rank_attempt, has_windows=False)
