from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.errors import InputError, UnsupportedArrayError


def test_a_single_rank_exchanges_nothing(alone):
    alone.barrier()
    assert alone.allreduce(3) == 3
    assert alone.allgather(np.array([1, 2])).tolist() == [[1, 2]]
    value = np.ones(2)
    found = alone.broadcast(value)
    found += 1
    assert value.tolist() == [1, 1], "the caller's own is not changed"


def test_what_cannot_be_exchanged_is_refused(alone):
    for op in ("mean", np.add, ["sum"]):
        with pytest.raises(InputError, match=r"op: expected one of sum, .* Give one of these, or"):
            alone.allreduce(3, op)
    with pytest.raises(InputError, match="value: expected numbers, got set"):
        alone.allreduce({"a": {1}})
    with pytest.raises(InputError, match=r"root: expected a rank below 1, got 1\. Give the"):
        alone.broadcast(3, root=1)
    with pytest.raises(
        InputError, match=r"value: expected a dtype that 'sum' combines, got datetime64\[s"
    ):
        alone.allreduce(np.datetime64(1, "s"))


@pytest.mark.parametrize("dtype", ["i1", "?", "f4", "c8", "M8[s]", "S3"])
def test_a_local_block_with_halos_keeps_its_dtype(alone, dtype):
    local_block = np.zeros(3, dtype)
    assert alone.with_halo(local_block).data.dtype == local_block.dtype
    assert alone.with_halo([1, 2, 3]).data.dtype == np.array([1]).dtype


@pytest.mark.parametrize(("local_block", "dtype"), [(0.5, "i8"), (1j, "f8"), (2, "?")])
def test_a_local_block_is_not_narrowed(alone, local_block, dtype):
    with pytest.raises(InputError, match=r"local: expected an array that becomes .* Convert it"):
        alone.with_halo(np.full(3, local_block), dtype=dtype)


MASKED = np.ma.masked_array([1.0, 2.0], [False, True])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("value", lambda ctx: ctx.allreduce(MASKED)),
        ("value", lambda ctx: ctx.allreduce(np.ma.masked_all(2).max(), "max")),
        ("value", lambda ctx: ctx.broadcast(MASKED)),
    ],
)
def test_masks_are_not_lost(alone, name, call):
    with pytest.raises(UnsupportedArrayError, match=f"{name}: expected a plain .* got Masked"):
        call(alone)


class Quantity(np.ndarray):
    """An array with a unit, as in astropy."""

    def __array_finalize__(self, like):
        self.unit = getattr(like, "unit", "m")


@pytest.mark.parametrize(
    "call",
    [
        lambda ctx, value: ctx.allreduce(value),
        lambda ctx, value: ctx.state(u=value),
    ],
)
def test_units_and_operators_are_not_lost(alone, call):
    with pytest.raises(UnsupportedArrayError, match=r"whose unit or operators .* np\.asarray"):
        call(alone, np.ones(3).view(Quantity))
    call(alone, np.ones(3).view(np.recarray))


def test_there_is_one_loop_of_steps(alone):
    """The state of one loop would be brought back into the other."""
    assert list(alone.steps(3)) == [0, 1, 2]
    with pytest.raises(InputError, match=r"expected one loop of ctx\.steps, got a second one"):
        list(alone.steps(3))


@pytest.mark.parametrize("count", ["a", 2.5])
def test_loops_of_something_else_are_refused(alone, count):
    with pytest.raises(
        InputError, match=f"expected a number of steps, .* got count={count!r}.*Give"
    ):
        list(alone.steps(count))


@pytest.mark.parametrize("state", [[np.zeros(3)], np.zeros(3), {"u": np.zeros(3)}])
def test_steps_need_a_state(alone, state):
    with pytest.raises(InputError, match=r"values from ctx\.state, got .* use s\.u in the loop"):
        list(alone.steps(3, state))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("Get_rank", r"ctx\.rank\."),
        ("Get_size", r"ctx\.size\."),
        ("Sendrecv", r"ctx\.sendrecv\."),
        ("Barrier", r"ctx\.barrier\."),
        ("Allgatherv", r"ctx\.allgather\(value, ragged=True\)\."),
        ("Sub", r"ctx\.along\(axis\)\."),
        ("update_halos", r"ctx\.update_halo\."),
    ],
)
def test_names_of_mpi_have_a_hint(alone, name, remedy):
    with pytest.raises(AttributeError, match=rf"got '{name}'\. Use {remedy}"):
        getattr(alone, name)
    assert not hasattr(alone, name)
