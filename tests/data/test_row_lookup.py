"""A row lookup equals a dictionary."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.row_lookup import RowLookup


@settings(max_examples=60, deadline=None)
@given(
    known=st.lists(
        st.integers(-(2**63), 2**63 - 1) | st.integers(0, 40), min_size=1, max_size=200, unique=True
    ),
    asked=st.lists(st.integers(-5, 60)),
)
def test_row_lookup_equals_a_dictionary(known, asked):
    lookup = RowLookup(np.array(known, dtype=np.int64))
    rows = {value: row for row, value in enumerate(known)}
    asked = [*known, *asked]
    assert lookup.rows(np.array(asked, dtype=np.int64)).tolist() == [
        rows.get(value, -1) for value in asked
    ]
