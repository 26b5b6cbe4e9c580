"""What several test modules need."""

from __future__ import annotations

import numpy as np


def indexed(shape, dtype=np.int64):
    """An array whose cells say where they are."""
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
