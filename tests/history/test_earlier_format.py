"""Records of the earlier format are read as they were written."""

import struct

from slipstream.history.earlier_format import read_records
from tests.support.history_stores import columns


def test_records_of_fixed_width_are_read():
    data = struct.pack("<qqff", 2**63 - 1, 5, 0.5, 0) + struct.pack("<qqff", -1, 6, 0, 1)
    found = read_records(40, data, "click\x1flike")
    assert columns(found) == ([2**63 - 1, -1], [5, 6], {"click": [0.5, 0], "like": [0, 1]})
    assert (found.first, found.total) == (40, 42)
    assert columns(read_records(0, struct.pack("<qq", 7, 8), "")) == ([7], [8], {})
