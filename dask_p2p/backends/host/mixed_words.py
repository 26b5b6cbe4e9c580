"""Sums of mixed words, for the checksum ``mixed64`` of bytes in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

_WORD_BYTES = 8
_STEP = 0x9E3779B97F4A7C15  # odd, so that all positions differ
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shift, and odd factor
_LAST_SHIFT = 31
_WORDS_AT_ONCE = 2**15  # intermediate results fit into a cache


def mixed_sum(data: Any) -> int:
    """Return the sum of the words of contiguous bytes, each mixed with its position.

    Zeros complete the last word.
    """
    total, whole_bytes = 0, data.size // _WORD_BYTES * _WORD_BYTES
    if whole_bytes:
        words = data[:whole_bytes].view("<u8")
        for first in range(0, words.size, _WORDS_AT_ONCE):
            total += _sum(words[first : first + _WORDS_AT_ONCE], first)
    if data.size > whole_bytes:
        last = np.zeros(_WORD_BYTES, "u1")
        last[: data.size - whole_bytes] = data[whole_bytes:]
        total += _sum(last.view("<u8"), whole_bytes // _WORD_BYTES)
    return total


def _sum(words: Any, first: int) -> int:
    """Return the sum of words, the first one at this position."""
    mixed = np.arange(first + 1, first + 1 + words.size, dtype="u8")
    mixed *= np.uint64(_STEP)
    mixed += words
    for shift, factor in _ROUNDS:
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(_LAST_SHIFT)
    return int(mixed.sum(dtype="u8"))
