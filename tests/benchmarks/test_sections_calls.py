from __future__ import annotations

import pytest

from benchmarks import sections_calls

pytestmark = pytest.mark.programs


def test_four_workers_transform_slabs_and_pencils(client):
    found = sections_calls.transforms_of(client, (8, 12, 6), 1, False, 30)
    assert found.keys() == {
        "Context.fftn",
        "Context.rfftn",
        *(f"{way}, {sections_calls.PENCILS}" for way in sections_calls.REAL),
    }
