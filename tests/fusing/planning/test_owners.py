from __future__ import annotations

from collections import Counter

import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.fusing.planning.owners import MOST_LITERAL_BYTES, owners_of, positions
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.tasks import keys_of
from tests.fusing.support import read_arrays


def owners(size, *arrays):
    return owners_of(read_arrays(*arrays)[1].tasks, size)


def of_blocks(owned, x):
    """The owners of an array's blocks, in order."""
    return [owned[key] for key in keys_of(x)]


@pytest.mark.parametrize(
    ("size", "expected"), [(4, [0, 0, 1, 1, 2, 2, 3, 3]), (3, None), (8, None)]
)
def test_blocks_without_inputs_are_spread_by_position(size, expected):
    x = da.ones((16, 4), chunks=(2, 4))
    found = of_blocks(owners(size, x), x)
    assert found == sorted(found)
    assert max(Counter(found).values()) == -(-8 // size)
    assert expected in (None, found)


def test_tasks_go_where_their_bytes_are():
    x = da.ones((16, 4), chunks=(2, 4))
    y = (x + 1)[::-1]  # blocks in the reverse order
    owned = owners(4, y)
    assert of_blocks(owned, y) == of_blocks(owned, x)[::-1]


def test_assembled_blocks_go_where_most_of_their_regions_are():
    x = da.ones((16, 4), chunks=(2, 4))
    y = dask_p2p.map_overlap(np.negative, x[::-1], depth={0: 1}, dtype=float)
    owned = owners(4, y)
    assert of_blocks(owned, y) == of_blocks(owned, x)[::-1]


def test_assembled_blocks_are_spread_evenly():
    """Also where one rank has most of the bytes of all."""
    x = da.ones((16, 16), chunks=((9, 1, 1, 1, 1, 1, 1, 1), 16))
    y = dask_p2p.transpose(x, chunks=(2, -1))
    counts = Counter(of_blocks(owners(4, y), y))
    assert counts == dict.fromkeys(range(4), 2)


def test_small_literals_are_everywhere_and_large_ones_have_an_owner():
    n = MOST_LITERAL_BYTES // 8
    small, large = da.from_array(np.ones(n), chunks=-1), da.from_array(np.ones(n + 1), chunks=-1)
    owned = owners(2, small + 1, large + 1)
    assert keys_of(small)[0] not in owned
    assert keys_of(large)[0] in owned


def test_words_in_keys_do_not_move_blocks():
    """Tasks for cumulative sums have words in their keys, in addition to the index of a block."""
    keys = [("x", i) for i in range(4)] + [("x", "extra", i) for i in range(4)]
    assert [positions(keys, 4)[key] for key in keys] == [0, 1, 2, 3] * 2
    strange = [("x", 1), ("x", None), ("x", 0)]
    assert sorted(positions(strange, 3).values()) == [0, 1, 2]


def test_delayed_values_of_one_function_are_spread():
    """Each has a key of its own, which ends in a random token."""
    keys = [f"read-{token * 8}" for token in "d40b"]
    assert [positions([*keys, "total"], 2)[key] for key in (*keys, "total")] == [0, 0, 1, 1, 0]


def test_ranks_with_most_bytes_come_first():
    x = da.ones((15, 3), chunks=((10, 1, 4), 3))
    y = dask_p2p.rechunk(x, (-1, 1))  # each block reads of all ranks
    assert of_blocks(owners(3, y), y) == [0, 2, 1]


def test_owners_that_are_decided():
    x = da.ones((16, 4), chunks=(2, 4))
    one = da.from_array(np.ones(1), chunks=1)  # a small literal, which has no owner of its own
    y = (dask_p2p.transpose(x + one) + 1).rechunk((2, 4))
    pinned = {key: 3 - number // 2 for number, key in enumerate(keys_of(x))}
    pinned |= dict.fromkeys([*keys_of(one), *keys_of(y)], 2)
    tasks = read_arrays(y)[1].tasks
    owned = owners_of(tasks, 4, pinned=pinned)
    assert {key: owned[key] for key in pinned} == pinned
    assert set(owned.values()) <= set(range(4))
    assert set(owners_of(tasks, 1).values()) == {0}


def exchanges(size, *arrays):
    """The number of exchanges of a program with tiny blocks."""
    first, *_ = programs_of(read_arrays(*arrays)[1].tasks, size)
    return len(first.supersteps) - 1


def test_a_tree_of_sums_takes_one_exchange():
    x = da.ones((32, 4), chunks=(1, 4))
    assert exchanges(4, x.sum()) == 1
    assert exchanges(4, x.max(axis=0)) == 1
    assert exchanges(4, (x - x.mean()) ** 2) == 2, "one that returns the mean"


def test_many_ranks_and_large_values_keep_their_trees():
    """One rank would receive too much."""
    x = da.ones((32, 4), chunks=(1, 4))
    assert exchanges(32, x.sum()) > exchanges(16, x.sum()) == 1
    x = da.ones((32, 2**20), chunks=(1, 2**20))
    assert exchanges(4, x.max(axis=0)) > 1


def test_outputs_and_tasks_with_several_readers_stay():
    x = da.ones((32, 4), chunks=(1, 4))
    half, rest = x[4:20].sum(), x[20:].sum()
    owned = owners(4, half + rest, half)
    (key,) = keys_of(half)
    alone = owners(4, half)
    assert owned[key] == alone[key]
