"""What every transport must do. A transport's tests subclass `Conformance`."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from dask_p2p.config import options
from dask_p2p.errors import BlockMismatchError, TransferError
from dask_p2p.transports.base import Request
from tests.support import BOUND_S, assert_same_bits
from tests.transports.reading import open_block

#: Fields of requests for blocks of this dtype.
FLOAT64 = {"dtype": "float64 <f8", "item_bytes": 8, "wait_s": 60.0}


class Conformance:
    """Subclasses provide the fixture `setup`, with these attributes:

    - `reader`: the transport under test, at the reader's end
    - `holder`: address of the other end
    - `kind`: of the blocks, "numpy" or "cupy"
    - `put(key, array)`: makes the holder hold a block, given as a NumPy array
    - `drop(key)`: makes the holder release a block
    - `close_holder()`: closes the holder's transport
    - `to_numpy(array)`
    """

    options = options()
    is_eager = False

    def open(self, setup, key, array, *boxes, **options):
        request_fields = setup.holder, key, array.shape, array.dtype, setup.kind
        whole_box = tuple((0, length) for length in array.shape)
        options = replace(self.options, **options)
        return open_block(
            setup.reader, *request_fields, boxes or [whole_box], options, is_eager=self.is_eager
        )

    def read(self, setup, key, array, box, **options):
        with closing(self.open(setup, key, array, box, **options)) as remote:
            region = remote.whole(setup.to_numpy, 20)
            remote.confirm()
            return region

    def refused(self, setup, block, words, error=TransferError, box=((0, 1), (0, 1)), **options):
        """Read from a block, which fails with an error of these words; return the error."""
        with pytest.raises(error, match=words) as caught:
            self.read(setup, *block, box, **options)
        return caught.value

    @pytest.fixture
    def block(self, setup):
        array = np.arange(60.0).reshape(6, 10)
        setup.put(("x-1", 0, 0), array)
        return ("x-1", 0, 0), array

    def test_there_is_no_obstacle(self, setup):
        assert setup.reader.obstacle(setup.holder, setup.kind, np.dtype("f8")) is None

    @pytest.mark.parametrize(
        "box",
        [
            ((0, 6), (0, 10)),
            ((2, 4), (0, 10)),
            ((0, 6), (3, 7)),
            ((5, 6), (9, 10)),
            ((3, 3), (0, 2)),
        ],
        ids=str,
    )
    def test_a_region_is_what_numpy_selects(self, setup, block, box):
        key, array = block
        expected = array[tuple(slice(*pair) for pair in box)]
        region = self.read(setup, key, array, box)
        assert region.dtype == array.dtype
        np.testing.assert_array_equal(region, expected)

    @pytest.mark.parametrize(
        "array",
        [
            np.array(7.5),
            np.arange(5, dtype="i1"),
            np.zeros((0, 4)),
            np.arange(24, dtype="c16").reshape(2, 3, 4),
            np.asfortranarray(np.arange(12, dtype="f4").reshape(3, 4)),
            np.array([True, False, True]),
            np.arange(6, dtype="f2").reshape(2, 3),
        ],
        ids=lambda a: f"{a.dtype}-{a.shape}",
    )
    def test_blocks_of_all_shapes_and_item_sizes(self, setup, array):
        setup.put("block", array)
        region = self.read(setup, "block", array, tuple((0, n) for n in array.shape))
        assert_same_bits(region, array)

    def test_many_requests_of_one_block(self, setup, block):
        key, array = block
        boxes = [((i, i + 1), (j, j + 2)) for i in range(6) for j in range(0, 10, 2)]
        boxes[7:7] = [((3, 3), (0, 10))]
        remote = self.open(setup, key, array, *boxes)
        futures = [remote.request() for _ in boxes]
        for box, future in zip(boxes, futures, strict=True):
            expected = array[tuple(slice(*pair) for pair in box)]
            np.testing.assert_array_equal(setup.to_numpy(future.result(BOUND_S)), expected)
        remote.close()

    def read_blocks(self, setup, arrays):
        """Read several blocks at once; return what came of each, its errors included."""
        boxes = [((1, 3), (0, 4)), ((3, 4), (1, 1))]
        requests = [
            Request(key, setup.holder, a.shape, a.dtype, setup.kind, boxes)
            for key, a in arrays.items()
        ]
        regions = {key: [] for key in arrays}
        with closing(setup.reader.read(requests, self.options)) as reading:
            for region in reading:
                key = requests[region.request].key
                try:
                    regions[key].append(np.array(setup.to_numpy(region.result(BOUND_S))))
                except (TransferError, BlockMismatchError) as exc:
                    regions[key].append(exc)
                    reading.drop(region.request)
            reading.confirm()
        return regions

    @pytest.fixture
    def blocks(self, setup):
        arrays = {("x", i): np.arange(20.0).reshape(5, 4) + 100 * i for i in range(6)}
        for key, array in arrays.items():
            setup.put(key, array)
        return arrays

    def test_several_blocks_of_a_holder_are_asked_for_at_once(self, setup, blocks):
        self.read_blocks(setup, dict([next(iter(blocks.items()))]))  # so that the two have met
        calls = getattr(setup, "host", getattr(setup, "there", None)).calls
        calls.clear()
        for key in blocks:
            setup.drop(key)
            setup.put(key, blocks[key])
        regions = self.read_blocks(setup, blocks)
        for key, array in blocks.items():
            np.testing.assert_array_equal(regions[key][0], array[1:3, :4])
            assert regions[key][1].shape == (1, 0)
        assert len(calls) == 1

    @pytest.mark.parametrize("failing_key", [0, 3, 5])
    def test_a_block_that_fails_does_not_keep_the_others_from_coming(
        self, setup, blocks, failing_key
    ):
        setup.drop(("x", failing_key))
        regions = self.read_blocks(setup, blocks)
        setup.put(("x", failing_key), np.ones((2, 2)))
        again = self.read_blocks(setup, blocks)
        assert regions["x", failing_key][0].scope == "block"
        for result, error in ((regions, TransferError), (again, BlockMismatchError)):
            assert isinstance(result["x", failing_key][0], error)
            for key, array in blocks.items():
                if key != ("x", failing_key):
                    np.testing.assert_array_equal(result[key][0], array[1:3, :4])

    def test_a_block_that_is_not_there(self, setup):
        error = self.refused(setup, ("nothing", np.zeros((2, 2))), r"not there.*|.*nothing")
        assert error.scope == "block"

    def test_a_block_of_another_shape(self, setup, block):
        key, array = block
        self.refused(setup, (key, array[:, :9]), r"declared as .*\(6, 9\)", BlockMismatchError)

    def test_a_block_of_another_dtype(self, setup, block):
        key, array = block
        self.refused(setup, (key, array.astype("f4")), "declared as float32", BlockMismatchError)

    def test_a_block_in_another_byte_order_is_converted_or_left_to_comm(self, setup, block):
        key, array = block
        if getattr(setup.reader, "converts", False):
            region = self.read(setup, key, array.astype(">f8"), ((0, 2), (1, 3)))
            assert region.dtype == ">f8"
            np.testing.assert_array_equal(setup.to_numpy(region), setup.to_numpy(array)[:2, 1:3])
            return
        words = "only comm changes the byte order"
        assert self.refused(setup, (key, array.astype(">f8")), words).scope == "region"

    def test_a_holder_that_is_closing_refuses(self, setup, block):
        self.read(setup, *block, ((0, 1), (0, 1)))  # so that the two have met
        setup.close_holder()
        self.refused(setup, block, setup.holder)

    def test_a_released_block_is_kept_while_it_is_read(self, setup, block):
        key, array = block
        remote = self.open(setup, key, array, ((0, 6), (0, 10)))
        before = remote.request().result(BOUND_S)
        setup.drop(key)
        np.testing.assert_array_equal(setup.to_numpy(before), array)
        remote.close()

    def test_a_replaced_block_is_read_anew(self, setup, block):
        key, array = block
        box = ((0, 6), (0, 10))
        np.testing.assert_array_equal(self.read(setup, key, array, box), array)
        setup.drop(key)
        setup.put(key, array + 1)
        np.testing.assert_array_equal(self.read(setup, key, array, box), array + 1)

    def test_closing_twice_and_with_requests_under_way(self, setup, block):
        key, array = block
        remote = self.open(setup, key, array, ((0, 6), (0, 10)), ((0, 1), (0, 10)))
        remote.request()
        remote.close()
        remote.close()
        np.testing.assert_array_equal(self.read(setup, key, array, ((0, 1), (0, 10))), array[:1])


class PackedConformance(Conformance):
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
        assert_same_bits(region, array[:, 1:])
