from __future__ import annotations

import pytest

from dask_p2p.errors import FileError


def refused(opening, path, *words):
    """Have a file refused, in one line that names it and says these words."""
    with pytest.raises(FileError) as caught:
        opening(str(path))
    text = str(caught.value)
    assert "\n" not in text
    for word in (str(path), *words):
        assert word in text
