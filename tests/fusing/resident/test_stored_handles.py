from __future__ import annotations

import numpy as np

from dask_p2p.fusing.resident.commands import blocks_of, sizes_of


def test_states_of_a_rank_and_its_copies():
    own, other = np.arange(5, dtype="u1"), np.arange(3, dtype="u1")
    states = {2: memoryview(own), 0: memoryview(other)}
    assert sizes_of(2, states) == [((2, 0), 5), ((0, 1), 3)]
    blocks = blocks_of("name", 2, states)
    assert [*blocks] == [("name", 2, 0), ("name", 0, 1)]
    assert all(map(np.shares_memory, blocks.values(), (own, other)))
    np.testing.assert_array_equal(blocks["name", 0, 1], other)
