import pickle
from weakref import ref

import dask.array as da
import numpy as np
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.errors import InputError
from dask_p2p.geometry import (
    ContiguousRuns,
    Layout,
    box_shape,
    box_size,
    box_slices,
    split_box,
    taper_last,
)
from dask_p2p.inputs import checked_choice, checked_count, checked_dtype
from dask_p2p.plans import redistribution


def test_a_layout_counts_elements_in_an_array_of_elements():
    memory = np.arange(7.0)
    first, second = Layout([(2, 2), (3,)]).views(memory, memory.dtype)
    assert first.tolist() == [[0, 1], [2, 3]]
    assert second.tolist() == [4, 5, 6]


boxes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted).map(tuple), max_size=4)


@given(boxes.map(tuple), st.integers(1, 50), st.none() | st.integers(0, 3), st.integers(1, 9))
def test_split_box_covers_it_once_within_the_limit(box, max_elements, axis, least):
    """And keeps runs where it can."""
    runs = () if axis is None else (ContiguousRuns(axis, least),)
    parts = [*split_box(box, max_elements, *runs)]
    count = np.zeros((10,) * len(box), int)
    for part in parts:
        shape = box_shape(part)
        assert 0 < box_size(part) <= max_elements or all(n == 1 for n in shape)
        count[box_slices(part)] += 1
        if axis is not None and axis < len(box) and any(n > 1 for n in shape[1:-1]):
            least_length = min(least, box_shape(box)[axis])
            assert axis != 0 or shape[0] >= least_length or part[0][1] == box[0][1]
    expected = np.zeros_like(count)
    expected[box_slices(box)] = 1
    np.testing.assert_array_equal(count, expected)


def shapes(box, max_elements, *runs):
    return {box_shape(part) for part in split_box(box, max_elements, *runs)}


def test_split_box_cuts_another_axis_where_runs_would_be_too_short():
    box = ((0, 8), (0, 8), (0, 4))
    assert shapes(box, 64) == {(2, 8, 4)}
    assert shapes(box, 64, ContiguousRuns(0, 4)) == {(8, 2, 4)}
    assert shapes(box, 128, ContiguousRuns(0, 4)) == {(4, 8, 4)}
    uneven = split_box(((0, 5), (0, 2), (0, 4)), 32, ContiguousRuns(0, 4))
    assert [box_shape(part) for part in uneven] == [(4, 2, 4), (1, 2, 4)]
    assert shapes(box, 64, ContiguousRuns(2, 4)) == {(2, 8, 4)}
    # Not one whose rows have gaps: nor the last one, if too little of that would be left.
    assert shapes(box, 64, ContiguousRuns(0, 4, 2)) == {(2, 8, 4)}
    long = ((0, 8), (0, 8), (0, 16))
    assert shapes(long, 256, ContiguousRuns(0, 4, 2)) == {(8, 8, 4)}
    assert shapes(long, 256, ContiguousRuns(0, 4, 3)) == {(2, 8, 16)}
    # Whatever lies in one row of the source stays together.
    assert shapes(((0, 8), (0, 8)), 16, ContiguousRuns(0, 8)) == {(2, 8)}
    assert shapes(box, 16, ContiguousRuns(0, 8)) == {(4, 1, 4)}


def test_tapered_parts_keep_runs():
    parts = [*taper_last([((0, 8), (0, 8), (0, 2))], 32, ContiguousRuns(0, 8))]
    assert [box_shape(part) for part in parts] == [(8, 4, 2), (8, 2, 2), (8, 2, 2)]


X = da.ones(3)
TAKE_A_CLIENT = (dask_p2p.check, dask_p2p.last_runs, dask_p2p.register)


@pytest.mark.parametrize("function", TAKE_A_CLIENT)
def test_what_is_no_open_client(function, cluster):
    with Client(cluster) as closed:
        pass
    with pytest.raises(InputError, match="the client is closed"):
        function(closed)
    for value, text in ((cluster, "tcp://"), (cluster.scheduler_address, "tcp://"), (X, "array")):
        with pytest.raises(InputError, match=rf"expected a distributed\.Client, got .*{text}"):
            function(value)


async def test_an_asynchronous_client_that_is_closed(cluster):
    async with Client(cluster.scheduler_address, asynchronous=True) as client:
        assert await dask_p2p.register(client) is None
    for function in TAKE_A_CLIENT:
        with pytest.raises(InputError, match="the client is closed"):
            function(client)


def test_numbers_that_may_be_zero():
    assert checked_count("things", 0, n=0) == 0
    for value in (-1, False, None):
        with pytest.raises(InputError, match=rf"at least 0, got n={value!r}"):
            checked_count("things", 0, n=value)


def test_choices():
    assert checked_choice("op", "sum", {"sum": 1, "max": 2}) == "sum"
    for value in ("mean", None, 1, ["sum"], {"sum": 1}, np.zeros(2), np.array(["sum", "max"])):
        with pytest.raises(InputError, match=r"op: expected one of sum, max, got .* Name one"):
            checked_choice("op", value, ("sum", "max"))


def test_dtypes():
    assert checked_dtype("dtype", "f4") == np.float32
    assert checked_dtype("dtype", [("a", "i4"), ("b", "f8")]).names == ("a", "b")
    for value in ("x", 3, 1.5, True, [], {}, (), [1], (1, 2, 3), {"a": 1}, np.zeros(2), object()):
        with pytest.raises(InputError, match=r"dtype: expected a dtype, got .* Give a type such"):
            checked_dtype("dtype", value)


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
