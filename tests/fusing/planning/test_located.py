from __future__ import annotations

from collections import Counter
from itertools import permutations

import dask.array as da
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.fusing.planning.owners import UNKNOWN, Locations, located_owners, owners_of
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.sizes import peak_bytes, sizes_of
from dask_p2p.fusing.planning.tasks import keys_of
from tests.fusing.planning.test_planner import check
from tests.fusing.support import check_blocks, generated, graphs, read_arrays, run_programs, smooth


def owners(holders, size, workers=2):
    """Owners of inputs on workers with names of one letter, whose positions are their order."""
    preferred = {number: number * size // len(holders) for number in range(len(holders))}
    found = located_owners(Locations(dict(enumerate(holders)), workers), preferred, size)
    return [found.get(number) for number in preferred]


@pytest.mark.parametrize(
    ("holders", "size", "expected"),
    [
        ("aabb", 2, [0, 0, 1, 1]),
        ("bbaa", 2, [0, 0, 1, 1]),
        ("abab", 2, [0, 1, 0, 1]),
        ("aaba", 2, [0, 0, 1, 0]),
        ("aaaa", 2, [0, 0, 0, 0]),
        ("babb", 2, [1, 0, 1, 1]),
        (["a", "b", "", "b"], 2, [0, 1, None, 1]),
        (["ab", "b", "ab", "a"], 2, [0, 0, 1, 1]),
        ("aabb", 1, [0, 0, None, None]),
        ("cccc", 4, [0, 1, 0, 1]),
        ("aabb", 4, [0, 1, 2, 3]),
        ("baba", 4, [0, 1, 2, 3]),
        ("abbb", 4, [0, 1, 2, 1]),
        (["", "", "", ""], 2, [None] * 4),
    ],
)
def test_owners_run_where_their_inputs_are(holders, size, expected):
    assert owners(holders, size) == expected


def test_no_locations():
    assert located_owners(UNKNOWN, {"x": 1}, 2) == {}


@given(st.data(), st.integers(1, 6), st.integers(1, 6))
def test_each_rank_has_inputs_of_one_worker(data, size, workers):
    names = "abcdef"[:workers]
    holders = data.draw(st.lists(st.sets(st.sampled_from(names)), min_size=1, max_size=24))
    found = owners(holders, size, workers)
    ranks_of = {name: set() for name in names}
    for of_input, owner in zip(holders, found, strict=True):
        assert owner is None or 0 <= owner < size
        if len(of_input) == 1:
            ranks_of[next(iter(of_input))] |= {owner} - {None}
    counts = Counter(rank for ranks in ranks_of.values() for rank in ranks)
    assert max(counts.values(), default=1) == 1
    assert all(len(ranks) <= max(1, size // workers) for ranks in ranks_of.values())
    if size >= workers:
        assert all((owner is None) == (not of) for of, owner in zip(holders, found, strict=True))


@given(st.permutations("aabbccdd"))
def test_half_as_many_inputs_as_possible_stay_at_their_positions(holders):
    found = owners(holders, 4, 4)
    stay = sum(owner == number // 2 for number, owner in enumerate(found))
    possible = [
        sum(each == order[number // 2] for number, each in enumerate(holders))
        for order in permutations("abcd")
    ]
    assert 2 * stay >= max(possible)


def made_by_dask(count=8, n=16):
    """An array whose blocks are inputs of a gang."""
    return da.map_blocks(generated, (n, n), 0, chunks=((n // count,) * count, (n,)), dtype=float)


def located(x, holders, workers=2):
    """Owners of all values of an array of inputs whose blocks lie on these workers."""
    tasks = read_arrays(x)[1].tasks
    locations = Locations(dict(zip(sorted(tasks.inputs), holders, strict=True)), workers)
    return tasks, owners_of(tasks, 2, locations=locations)


def test_tasks_of_neighbours_stay_together():
    x = made_by_dask()
    for _ in range(9):
        y = x = dask_p2p.map_overlap(smooth, x, depth={0: 1}, boundary="periodic", dtype=float)
    tasks, owned = located(y, "abababab")
    assert [owned[key] for key in sorted(tasks.inputs)] == [0, 1] * 4
    assert [owned[key] for key in keys_of(y)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("holders", "expected"), [("abababab", [0, 1] * 4), ("aaaaaaab", [0] * 4 + [1] * 4)]
)
def test_tasks_stay_with_their_inputs_if_these_are_spread_evenly(holders, expected):
    y = made_by_dask() + 1
    _, owned = located(y, holders)
    assert [owned[key] for key in keys_of(y)] == expected


def test_decided_owners_stay():
    tasks = read_arrays(made_by_dask() * 2)[1].tasks
    pinned = {key: number % 2 for number, key in enumerate(sorted(tasks.inputs))}
    owned = owners_of(tasks, 2, pinned=pinned, locations=Locations(dict.fromkeys(pinned, "a"), 2))
    assert {key: owned[key] for key in pinned} == pinned


def test_large_inputs_are_read_in_place():
    tasks = read_arrays(dask_p2p.fft.fft(made_by_dask(n=1024), axis=1))[1].tasks
    locations = Locations(dict.fromkeys(tasks.inputs, "a"), 2)
    sizes = dict.fromkeys((*tasks.inputs, *tasks.nodes), 2**20)
    assert not programs_of(tasks, 2, sizes)[0].reads_memory
    assert programs_of(tasks, 2, sizes, locations=locations)[0].reads_memory


@given(graphs(), st.integers(2, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_values_are_equal_wherever_inputs_lie(arrays, size, workers, random):
    tasks = read_arrays(*arrays)[1].tasks
    holders = {key: random.sample("abcd"[:workers], random.randint(0, 1)) for key in tasks.inputs}
    locations = Locations(holders, workers)
    check(tasks, programs_of(tasks, size, locations=locations))
    check_blocks(arrays, run_programs(arrays, size, locations))


def test_ranks_with_all_inputs_and_with_none_hold_few_blocks():
    """They run the tasks of a layer in the same superstep, so each exchange may bring a part."""
    x = made_by_dask(16, 4096)
    tasks = read_arrays((dask_p2p.transpose(x) + 1).sum(axis=0))[1].tasks
    sizes = sizes_of(tasks, dict.fromkeys(tasks.inputs, x.nbytes // 16))
    locations = Locations(dict.fromkeys(tasks.inputs, "a"), 2)
    for program in programs_of(tasks, 2, sizes, locations=locations):
        assert peak_bytes(program, sizes | dict.fromkeys(tasks.inputs, 0)) < x.nbytes / 4
