from __future__ import annotations

from collections import Counter

import pytest

from dask_p2p.plans.ranks import ORDERS, branch, partners


@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize("size", range(1, 18))
def test_each_pair_comes_once_and_no_rank_twice_in_a_stage(order, size):
    each = [partners(order, rank, size) for rank in range(size)]
    assert len({*map(len, each)}) == 1, "all have as many stages"
    pairs = Counter()
    for stage in zip(*each, strict=True):
        sent = [(rank, to) for rank, (to, _) in enumerate(stage) if to is not None]
        received = [(source, rank) for rank, (_, source) in enumerate(stage) if source is not None]
        assert sorted(sent) == sorted(received)
        assert len({to for _, to in sent}) == len(sent)
        pairs.update(sent)
    assert pairs == Counter((a, b) for a in range(size) for b in range(size) if a != b)


@pytest.mark.parametrize("size", range(2, 18))
def test_partners_of_each_order(size):
    for rank in range(size):
        assert all(to == source for to, source in partners("pairwise", rank, size))
        assert len(partners("pairwise", rank, size)) == size - 1 + size % 2
        diagonal = partners("diagonal", rank, size)
        assert [to for to, _ in diagonal] == [(rank + by) % size for by in range(1, size)]
        right, *left = partners("left-right", rank, size)
        assert right == ((rank + 1) % size, (rank - 1) % size)
        assert not left or left[0] == right[::-1]


@pytest.mark.parametrize("size", [1, 2, 3, 9, 10, 73, 74, 1000])
def test_a_tree_has_all_ranks_and_few_connections_of_each(size):
    each = [branch(rank, size) for rank in range(size)]
    assert each[0][0] == []
    for rank, (above, below) in enumerate(each):
        assert all(each[other][0] == [rank] for other in below)
        assert all(rank in each[other][1] and other < rank for other in above)
        assert len(above) + len(below) <= 9
    assert sum(len(below) for _, below in each) == size - 1
