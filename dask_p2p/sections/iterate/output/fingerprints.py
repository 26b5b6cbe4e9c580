"""Numbers that distinguish the values of arrays, for any division of the arrays between ranks.

A fingerprint is the sum, modulo 2**64, of all words of an array's elements, each times a weight
that depends on its index in the whole array. So the sum of the fingerprints of all parts is that of
the whole array::

    fingerprint(x[:5], box 0..5) + fingerprint(x[5:], box 5..9) = fingerprint(x, box 0..9)
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from dask_p2p.geometry import Box, box_slices, split_box
from dask_p2p.ops.zarr_arrays import CONFIG
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.iterate.output.groups import stored
from dask_p2p.types import Array

_COPIED_ELEMENTS = 2**21  # of one copy from a GPU
_PIECE_ELEMENTS = 2**13  # whose words and weights stay in a cache
_WORD_BYTES = 4, 2, 1  # products of 64-bit words with weights would overflow
# Those of the generator SplitMix64: https://prng.di.unimi.it/splitmix64.c
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MIXING = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
_LAST_SHIFT = 31


def fingerprint(device: Host, block: Array, box: Box) -> np.uint64:
    """Return the fingerprint of a part of an array.

    Parameters
    ----------
    device
        Device of the part.
    block
        Elements of the part.
    box
        Bounds of the part in the whole array.
    """
    total = np.zeros((), np.uint64)
    if not box:
        block, box = block.reshape(1), ((0, 1),)
    starts = [start for start, _ in box]
    for copied in split_box(box, _COPIED_ELEMENTS):
        host = device.to_host(block[box_slices(_relative(copied, starts))])
        own = [start for start, _ in copied]
        for piece in split_box(copied, _PIECE_ELEMENTS):
            total += _of_piece(host[box_slices(_relative(piece, own))], piece)
    return np.uint64(total)


def fingerprint_of_same(device: Host, value: Array, rank: int) -> np.uint64:
    """Return a rank's part of the fingerprint of a number that all ranks have: it counts once."""
    return np.uint64(0) if rank else fingerprint(device, value, ())


class Parts:
    """Reads or writes one rank's parts of the arrays of a group, and sums their fingerprints.

    The sum over all ranks is the same for any division of the arrays between ranks. It changes with
    each element, and with the name, dtype and shape of each array.
    """

    def __init__(self) -> None:
        self.fingerprint = np.uint64(0)

    def write(self, group: Any, name: str, block: Array, box: Box) -> None:
        """Write a part of an array."""
        array = stored(group, name)
        if block.size:
            array[box_slices(box)] = block
        self._add(array, name, block, box)

    def create(self, group: Any, name: str, values: Array) -> None:
        """Create an array with some values."""
        self._add(group.create_array(name, data=values, config=CONFIG), name, values)

    def read(self, group: Any, name: str, box: Box | None = None, counts: bool = True) -> Array:
        """Return a part of an array, by default all of it; it may be one that counts elsewhere."""
        array = group[name]
        block = np.asarray(array[... if box is None else box_slices(box)])
        if counts:
            self._add(array, name, block, box)
        return block

    def _add(self, array: Any, name: str, block: Array, box: Box | None = None) -> None:
        box = tuple((0, length) for length in array.shape) if box is None else box
        text = f"{name} {array.dtype.str} {array.shape}".encode()
        weight = np.uint64(int.from_bytes(blake2b(text, digest_size=8).digest()) | 1)
        part = fingerprint(HOST, block, box) if block.size else np.uint64(0)
        with np.errstate(over="ignore"):
            self.fingerprint += weight * part


def _of_piece(block: Any, box: Box) -> np.uint64:
    block = np.ascontiguousarray(block)
    word_bytes = next(n for n in _WORD_BYTES if block.dtype.itemsize % n == 0)
    weights = [_weights(axis, *bounds) for axis, bounds in enumerate(box)]
    of_words = _weights(len(box), 0, block.dtype.itemsize // word_bytes)
    weights[-1] = np.multiply.outer(weights[-1], of_words).ravel()
    sums = block.view(f"u{word_bytes}").astype(np.uint64)
    for of_axis in reversed(weights):
        sums = sums @ of_axis
    return np.uint64(sums)


def _weights(axis: int, start: int, stop: int) -> Any:
    """Return odd numbers for the indices of an axis."""
    found = np.arange(start, stop, dtype=np.uint64)
    found += np.uint64((axis + 1) << 56)  # other numbers for each axis
    found *= _INCREMENT
    for shift, factor in _MIXING:
        found ^= found >> np.uint64(shift)
        found *= np.uint64(factor)
    found ^= found >> np.uint64(_LAST_SHIFT)
    return found | np.uint64(1)


def _relative(box: Box, origin: list[int]) -> Box:
    return tuple((lo - at, hi - at) for (lo, hi), at in zip(box, origin, strict=True))
