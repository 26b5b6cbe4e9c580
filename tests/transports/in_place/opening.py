"""What a block does that stays open, as a solver has those of its neighbours."""

from __future__ import annotations

import os
from contextlib import closing, suppress

import numpy as np
import pytest

from dask_p2p.errors import BlockMismatchError, BlockUnavailableError, TransferError
from dask_p2p.transports.in_place.leases import FILE
from dask_p2p.transports.reading import Request

WHOLE = ((0, 6), (0, 10))
RIM = ((5, 6), (0, 10))


def open_files():
    """Count the files of descriptors that this process has open."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{fd}").endswith(FILE)
    return count


class Opening:
    """Tests of each transport that reads in place, beside those of `Conformance`."""

    def opened(self, setup, key, array, *boxes):
        wanted = Request(key, setup.holder, array.shape, array.dtype, setup.kind, boxes)
        return setup.reader.open(wanted, self.options)

    def kept(self, setup):
        """Blocks that the holder keeps alive."""
        return setup.serving.directory.expire(60)

    def look(self, setup, opened, box=WHOLE):
        return np.array(setup.to_numpy(opened.region(box).result(20)))

    @pytest.mark.parametrize("boxes", [[], [RIM], [RIM, WHOLE]], ids=len)
    def test_an_opened_block_is_read_again_and_again(self, setup, block, boxes):
        key, array = block
        with closing(self.opened(setup, key, array, *boxes)) as opened:
            for _ in range(3):
                assert opened.holder_lives()
                np.testing.assert_array_equal(self.look(setup, opened, RIM), array[5:])
            np.testing.assert_array_equal(self.look(setup, opened), array)
            assert opened.is_open

    def test_an_opened_block_outlives_its_release(self, setup, block):
        key, array = block
        before = self.kept(setup)
        opened = self.opened(setup, key, array)
        setup.drop(key)
        np.testing.assert_array_equal(self.look(setup, opened), array)
        setup.put(key, array + 1)
        again = self.opened(setup, key, array)
        np.testing.assert_array_equal(self.look(setup, opened), array)
        np.testing.assert_array_equal(self.look(setup, again), array + 1)
        assert self.kept(setup) == before + 2
        opened.close()
        np.testing.assert_array_equal(self.look(setup, again), array + 1)
        assert self.kept(setup) == before + 1
        again.close()
        setup.drop(key)
        assert self.kept(setup) == before

    def test_an_opened_block_that_is_closed(self, setup, block):
        key, array = block
        before = open_files()
        opened = self.opened(setup, key, array)
        assert open_files() == before + 1
        opened.close()
        opened.close()
        assert not opened.is_open
        assert open_files() == before
        for use in (opened.holder_lives, lambda: opened.region(RIM)):
            with pytest.raises(TransferError, match=r"block .* is closed"):
                use()

    @pytest.mark.parametrize("box", [((0, 7), (0, 10)), ((-1, 2), (0, 10)), ((0, 6),), ()], ids=str)
    def test_a_region_that_does_not_lie_in_the_block(self, setup, block, box):
        """There may be anything beside it in the holder's memory."""
        key, array = block
        said = pytest.raises(ValueError, match=r"does not lie in a block of \(6, 10\)")
        with closing(self.opened(setup, key, array)) as opened, said:
            opened.region(box)

    def test_blocks_are_opened_and_closed_each_for_itself(self, setup, block):
        key, array = block
        first, second = (self.opened(setup, key, array) for _ in range(2))
        setup.drop(key)
        kept = self.kept(setup)
        first.close()
        assert self.kept(setup) == kept
        np.testing.assert_array_equal(self.look(setup, second), array)
        second.close()
        assert self.kept(setup) == kept - 1

    def test_a_block_that_cannot_be_opened(self, setup, block):
        key, array = block
        before = open_files()
        with pytest.raises(BlockUnavailableError) as missing:
            self.opened(setup, "nothing", array)
        with pytest.raises(BlockMismatchError) as mismatch:
            self.opened(setup, key, array.T)
        assert open_files() == before, (missing, mismatch)
        setup.drop(key)
        assert self.kept(setup) == 0

    def test_a_block_without_elements_can_be_opened(self, setup):
        array = np.zeros((0, 10))
        setup.put("empty", array)
        with closing(self.opened(setup, "empty", array, ((0, 0), (0, 10)))) as opened:
            assert opened.holder_lives()
            assert self.look(setup, opened, ((0, 0), (2, 4))).shape == (0, 2)
