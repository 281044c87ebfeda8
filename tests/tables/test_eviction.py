"""The smallest entries are found, ties column by column."""

import numpy as np

from slipstream.tables.eviction import smallest


def test_smallest_breaks_ties_column_by_column():
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, 4, 200), rng.integers(0, 4, 200), rng.permutation(200)]
    for count in (0, 1, 17, 100, 199, 200, 300):
        expected = np.lexsort(columns[::-1])[:count]
        assert set(smallest(count, *columns)) == set(expected)
