from __future__ import annotations

import pickle

import numpy as np

from dask_p2p.plans import block_plans, redistribution
from dask_p2p.plans.fft import ReorderedPlan
from tests.plans.support import assembled, blocks_of, elements_read


def test_blocks_keep_their_indices_and_have_another_order_in_memory():
    x = np.arange(4 * 6 * 5).reshape(4, 6, 5)
    before, order = ((2, 2), (6,), (3, 2)), (2, 0, 1)
    plan = ReorderedPlan(redistribution(before, order, ((1, 4), (4,), (2, 4))), order)
    assert plan.chunks == ((4,), (2, 4), (1, 4))
    sources, expected = blocks_of(x, before), blocks_of(x, plan.chunks)
    for index, block in block_plans(plan):
        got = assembled(block, sources, x.dtype)
        np.testing.assert_array_equal(got, expected[index].transpose(order))
        assert plan.sources(index) == block.sources
        assert plan.source_elements(index) == elements_read(block)
    assert pickle.loads(pickle.dumps(plan)) == plan
