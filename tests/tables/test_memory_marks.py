"""Marks are a set of rows."""

import torch

from slipstream.tables.memory_marks import RowMarks


def test_marks_are_a_set_of_rows():
    marks, rows = RowMarks(1001), torch.tensor([1000, 0, 7, 8, 500, 8])
    marks.mark(rows)
    assert marks.marked().tolist() == [0, 7, 8, 500, 1000]
    assert marks.unmarked(torch.tensor([7, 9, 1000])).tolist() == [False, True, False]
    larger = marks.extended(5000)
    assert larger.marked().tolist() == [0, 7, 8, 500, 1000] and len(larger.bits) == 625
    marks.mark_all()
    assert marks.marked().tolist() == list(range(1001))
