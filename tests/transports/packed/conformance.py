"""What each transport must do that packs regions: they are bytes, so every dtype is taken."""

import numpy as np
import pytest

from tests.transports.conformance import Conformance


class PackedConformance(Conformance):
    """Subclasses provide what `Conformance` asks for."""

    @pytest.mark.parametrize(
        "dtype",
        [">f8", ">i2", "M8[ns]", "U3", "V7", [("a", "i1"), ("b", ">f8")], "longdouble"],
        ids=str,
    )
    def test_dtypes_of_numpy(self, setup, dtype):
        array = np.zeros((3, 4), dtype)
        array.view("u1")[...] = 1
        setup.put("block", array)
        region = self.read(setup, "block", array, ((0, 3), (1, 4)))
        assert region.dtype == array.dtype
        assert region.tobytes() == array[:, 1:].tobytes()
