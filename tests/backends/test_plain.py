import dask.array as da
import numpy as np
import pint
import pytest

from dask_p2p.backends import backend_for
from dask_p2p.backends.base import check_plain, is_plain
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.sections.checks import strict_view


class Quantity(np.ndarray):
    """An array with a unit, as in astropy."""

    def __array_finalize__(self, like):
        self.unit = getattr(like, "unit", "m")


class Modular(np.ndarray):
    """An array with an operator of its own."""

    def __add__(self, addend):
        return (np.asarray(self) + addend) % 7


@pytest.mark.parametrize(
    ("value", "lost"),
    [
        (np.ma.masked_array([1, 2], [True, False]), "mask"),
        (np.ma.masked_all(2).max(), "mask"),
        (np.ones((2, 2)).view(np.matrix), "unit or operators"),
        (np.ones(2).view(Quantity), "unit or operators"),
        (np.ones(2).view(Quantity).sum(), "unit or operators"),
        (np.ones(2).view(Modular), "unit or operators"),
        (np.ones(2) * pint.get_application_registry().m, "unit or operators"),
    ],
)
def test_arrays_that_are_more_than_their_elements(value, lost):
    assert not is_plain(value)
    with pytest.raises(UnsupportedArrayError, match=f"^u: expected .* whose {lost} would be lost"):
        check_plain("u", value)
    with pytest.raises(UnsupportedArrayError):
        backend_for(value)


@pytest.mark.parametrize(
    "value",
    [
        np.ones(2),
        type("ndarray", (), {"__module__": "cupy", "__array_function__": None})(),
        type("csr_matrix", (), {"__module__": "cupyx.scipy", "__array_function__": None})(),
        np.ones(2).view(np.memmap),
        np.ones(2).view(np.recarray),
        np.float32(3),
        3.5,
        [1, 2],
        None,
        strict_view(np.ones(2), np),
        da.ones(2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_arrays_and_other_values(value):
    assert is_plain(value)
    check_plain("u", value)
