from __future__ import annotations

from dask_p2p.backends.kept_results import KeptResults


class Computed:
    """Results, and the keys for which they were computed."""

    def __init__(self, **options):
        self.results, self.keys = KeptResults(**options), []

    def __call__(self, known, key):
        return self.results.of(known, key, lambda: self.keys.append(key) or [*known])


def test_a_result_is_computed_once_for_an_object_and_a_key():
    computed = Computed()
    pieces, equal = [1, 2], [1, 2]
    first = computed(pieces, "f8")
    assert computed(pieces, "f8") is first
    assert computed(pieces, "i4") is not first
    assert computed(equal, "f8") is not first, "equal objects may differ: 0.0 and -0.0 are equal"
    assert computed.keys == ["f8", "i4", "f8"]


def test_new_objects_do_not_get_the_results_of_others():
    """Without a reference, a new object would have the identity of the one before."""
    computed = Computed()
    found = [computed([number], "") for number in range(100)]
    assert found == [[number] for number in range(100)]


def test_few_results_are_kept():
    computed, pieces = Computed(most=2), []
    for _ in range(2):
        for key in range(3):
            computed(pieces, key)
    assert computed.keys == [0, 1, 2, 0, 1, 2]
