from collections import Counter

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.fusing.planning.owners import (
    MOST_LITERAL_BYTES,
    Locations,
    located_owners,
    owners_of,
    positions,
)
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.tasks import keys_of
from tests.fusing import support
from tests.fusing.planning.test_planner import check
from tests.fusing.support import generated, tasks_and_sizes


def owners(size, *arrays):
    tasks, sizes = tasks_and_sizes(*arrays)
    return owners_of(tasks, size, sizes)


def of_blocks(owned, x):
    """The owners of an array's blocks, in order."""
    return [owned[key] for key in keys_of(x)]


@pytest.mark.parametrize(
    ("size", "expected"), [(4, [0, 0, 1, 1, 2, 2, 3, 3]), (3, None), (8, None)]
)
def test_blocks_without_inputs_are_spread_by_position(size, expected):
    x = da.ones((16, 4), chunks=(2, 4))
    ranks = of_blocks(owners(size, x), x)
    assert ranks == sorted(ranks)
    assert max(Counter(ranks).values()) == -(-8 // size)
    assert expected in (None, ranks)


def test_assembled_blocks_go_where_most_of_their_regions_are():
    x = da.ones((16, 4), chunks=(2, 4))
    y = dask_p2p.map_overlap(np.negative, x[::-1], depth={0: 1}, dtype=float)
    owned = owners(4, y)
    assert of_blocks(owned, y) == of_blocks(owned, x)[::-1]


def test_assembled_blocks_are_spread_evenly():
    """Also where one rank has most of the bytes of all."""
    x = da.ones((16, 16), chunks=((9, 1, 1, 1, 1, 1, 1, 1), 16))
    y = dask_p2p.transpose(x, chunks=(2, -1))
    assert Counter(of_blocks(owners(4, y), y)) == dict.fromkeys(range(4), 2)


def test_small_literals_are_everywhere_and_large_ones_have_an_owner():
    n = MOST_LITERAL_BYTES // 8
    small, large = da.from_array(np.ones(n), chunks=-1), da.from_array(np.ones(n + 1), chunks=-1)
    owned = owners(2, small + 1, large + 1)
    assert keys_of(small)[0] not in owned
    assert keys_of(large)[0] in owned


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
    tasks, sizes = tasks_and_sizes(y)
    owned = owners_of(tasks, 4, sizes, pinned)
    assert {key: owned[key] for key in pinned} == pinned
    assert set(owned.values()) <= set(range(4))
    assert set(owners_of(tasks, 1, sizes).values()) == {0}


def exchanges(size, *arrays):
    """The number of exchanges of a program with tiny blocks."""
    tasks, sizes = tasks_and_sizes(*arrays)
    first, *_ = programs_of(tasks, size, sizes)
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


@given(st.data(), st.integers(1, 6), st.integers(1, 6))
def test_each_rank_has_inputs_of_one_worker(data, size, workers):
    names = "abcdef"[:workers]
    holders = data.draw(st.lists(st.sets(st.sampled_from(names)), min_size=1, max_size=24))
    preferred = {number: number * size // len(holders) for number in range(len(holders))}
    owner_of = located_owners(Locations(dict(enumerate(holders)), workers), preferred, size)
    input_owners = [owner_of.get(number) for number in preferred]
    ranks_of = {name: set() for name in names}
    for of_input, owner in zip(holders, input_owners, strict=True):
        assert owner is None or 0 <= owner < size
        if len(of_input) == 1:
            ranks_of[next(iter(of_input))] |= {owner} - {None}
    counts = Counter(rank for ranks in ranks_of.values() for rank in ranks)
    assert max(counts.values(), default=1) == 1
    assert all(len(ranks) <= max(1, size // workers) for ranks in ranks_of.values())
    if size >= workers:
        assert all(
            (owner is None) == (not addresses)
            for addresses, owner in zip(holders, input_owners, strict=True)
        )


def made_by_dask(count=8, n=16):
    """An array whose blocks are inputs of a gang."""
    return da.map_blocks(generated, (n, n), 0, chunks=((n // count,) * count, (n,)), dtype=float)


@pytest.mark.parametrize(
    ("holders", "expected"), [("abababab", [0, 1] * 4), ("aaaaaaab", [0] * 4 + [1] * 4)]
)
def test_tasks_stay_with_their_inputs_if_these_are_spread_evenly(holders, expected):
    y = made_by_dask() + 1
    tasks, sizes = tasks_and_sizes(y)
    locations = Locations(dict(zip(sorted(tasks.inputs), holders, strict=True)), 2)
    owned = owners_of(tasks, 2, sizes, locations=locations)
    assert [owned[key] for key in keys_of(y)] == expected


def test_large_inputs_are_read_in_place():
    tasks = support.read_arrays(dask_p2p.fft.fft(made_by_dask(n=1024), axis=1))[1]
    locations = Locations(dict.fromkeys(tasks.inputs, "a"), 2)
    sizes = dict.fromkeys((*tasks.inputs, *tasks.nodes), 2**20)
    assert not programs_of(tasks, 2, sizes)[0].reads_memory
    assert programs_of(tasks, 2, sizes, locations=locations)[0].reads_memory


@given(support.graphs(), st.integers(2, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_values_are_equal_wherever_inputs_lie(arrays, size, workers, random):
    tasks, sizes = tasks_and_sizes(*arrays)
    holders = {key: random.sample("abcd"[:workers], random.randint(0, 1)) for key in tasks.inputs}
    locations = Locations(holders, workers)
    check(tasks, programs_of(tasks, size, sizes, locations=locations))
    support.check_blocks(arrays, support.run_programs(arrays, size, locations))
