"""Checksums: every kind of array, every bit; the device's on a GPU equals the same by NumPy."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from dask_p2p.backends import BACKENDS
from dask_p2p.backends.kernels.checksum import ALGORITHMS, checksum
from dask_p2p.backends.numpy import NUMPY
from tests.backends.support import DTYPES, random_bits

LENGTHS = [0, 1, 7, 8, 9, 15, 16, 63, 64, 1000, 2**18 - 1, 2**18, 2**18 + 8, 2**18 + 13]

both = pytest.mark.parametrize("algorithm", ALGORITHMS)


def mixed64(data, start=0):
    """The definition, word by word, in whole numbers."""
    total = start + len(data)
    for i in range(0, len(data), 8):
        word = int.from_bytes(data[i : i + 8].ljust(8, b"\0"), "little")
        word = (word + (i // 8 + 1) * 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        total += word ^ word >> 31
    return total % 2**64


def test_the_algorithm_goes_by_the_backend():
    assert {backend.checksum_algorithm for backend in BACKENDS.values()} == {*ALGORITHMS}
    assert NUMPY.checksum_algorithm == "crc32"
    array = np.arange(3.0)
    assert checksum(array) == checksum(array, "crc32") == zlib.crc32(array.tobytes())
    with pytest.raises(ValueError, match="expected one of crc32, mixed64, got 'md5'"):
        checksum(array, "md5")


@pytest.mark.parametrize("length", LENGTHS)
def test_any_length_is_as_defined(length):
    array = random_bits((length,), "u1")
    assert checksum(array, "mixed64") == mixed64(array.tobytes())
    assert checksum(array, "mixed64", 2**63) == mixed64(array.tobytes(), 2**63)
    assert checksum(array, "crc32", 99) == zlib.crc32(array.tobytes(), 99)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_count_and_nothing_else(algorithm, dtype):
    array = random_bits((5, 7), dtype)
    expected = checksum(np.frombuffer(array.tobytes(), "u1"), algorithm)
    readonly = array.view()
    readonly.flags.writeable = False
    shifted = np.empty(array.nbytes + 1, "u1")[1:].view(dtype).reshape(5, 7)
    shifted.reshape(-1).view("u1")[...] = array.reshape(-1).view("u1")
    same_values = [array, readonly, shifted]
    if not (dtype.fields and dtype.isalignedstruct):  # NumPy does not copy what is between fields
        same_values += [np.asfortranarray(array), array[::-1].copy()[::-1]]
    for same in same_values:
        assert checksum(same, algorithm) == expected


@both
def test_arrays_without_dimensions_or_items(algorithm):
    assert checksum(np.array(7.5), algorithm) == checksum(np.array([7.5]), algorithm)
    for empty in (np.zeros((0, 3)), np.zeros(3, "V0")):
        assert checksum(empty, algorithm, 5) == 5


@both
@pytest.mark.parametrize("length", [1, 8, 13, 40])
def test_every_flipped_bit_and_every_two_are_found(algorithm, length):
    array = random_bits((length,), "u1")
    good = checksum(array, algorithm)
    sums = set()
    for first in range(8 * length):
        array[first // 8] ^= 1 << first % 8
        assert checksum(array, algorithm) != good
        if length <= 13:
            for second in range(first):
                array[second // 8] ^= 1 << second % 8
                sums.add(checksum(array, algorithm))
                array[second // 8] ^= 1 << second % 8
        array[first // 8] ^= 1 << first % 8
    assert good not in sums


@both
def test_signs_and_words_that_change_places_are_found(algorithm):
    array = np.arange(1, 1001.0)
    good = checksum(array, algorithm)
    negative = array.copy()
    negative[[3, 700]] *= -1
    swapped = array.copy()
    swapped[[3, 700]] = array[[700, 3]]
    rolled = np.roll(array, 1)
    assert good not in {checksum(other, algorithm) for other in (negative, swapped, rolled)}


def on_gpu(array):
    """Copy an array to the GPU, and wait until it is there: small copies go on by themselves."""
    import cupy

    near = cupy.asarray(array)
    cupy.cuda.Stream.null.synchronize()
    return near


@pytest.mark.gpu
class TestOnGpu:
    @both
    @pytest.mark.parametrize("length", [*LENGTHS, 2**24, 2**24 + 5, 3 * 2**24 - 3])
    def test_equal_to_numpy(self, algorithm, length):
        array = random_bits((length,), "u1")
        near = on_gpu(array)
        assert checksum(near, algorithm, 7) == checksum(array, algorithm, 7)
        assert checksum(near) == checksum(array, "mixed64")

    def test_strided_and_misaligned_arrays(self):
        array = random_bits((65, 33), "u1")
        near = on_gpu(array)
        for cut in (np.s_[1:, :], np.s_[:, 3:], np.s_[::-1, ::2], np.s_[3:3]):
            assert checksum(near[cut]) == checksum(array[cut], "mixed64")

    def test_every_flipped_bit_is_found(self):
        import cupy

        near = on_gpu(random_bits((2**24 + 13,), "u1"))
        good = checksum(near)
        bits = 8 * near.size
        rng = np.random.default_rng(0)
        for bit in [0, 1, 63, 64, bits // 2, bits - 1, *map(int, rng.integers(0, bits, 200))]:
            near[bit // 8] ^= 1 << bit % 8
            cupy.cuda.Stream.null.synchronize()
            assert checksum(near) != good, bit
            near[bit // 8] ^= 1 << bit % 8
        cupy.cuda.Stream.null.synchronize()
        assert checksum(near) == good
