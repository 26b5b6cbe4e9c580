from __future__ import annotations

import pickle
from weakref import ref

from dask_p2p.plans import redistribution


def test_all_readers_of_a_shared_value_get_one_object():
    sent = pickle.dumps(redistribution(((3, 1),), (0,), ((1, 3),)))
    first, second = pickle.loads(sent), pickle.loads(sent)
    assert first is second
    assert pickle.dumps(first) == sent, "a reader sends the same bytes"
    reference = ref(first)
    del first, second
    assert reference() is None, "nothing keeps an unused value"


def test_a_shared_value_is_sent_without_cached_properties():
    plan = redistribution(((2,) * 100,) * 2, (1, 0), ((2,) * 100,) * 2)
    sent = pickle.dumps(redistribution(((2,) * 100,) * 2, (1, 0), ((2,) * 100,) * 2))
    assert [plan.sources((i, i)) for i in range(100)] == [((i, i),) for i in range(100)]
    assert len(pickle.dumps(plan)) < 2 * len(sent)
