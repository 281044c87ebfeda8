"""Rows outside a step's buffer: read and updated as the table would, wherever the newest is."""

from contextlib import nullcontext

import pytest
import torch

from slipstream.pipeline.buffers import RowBuffer
from slipstream.pipeline.current_rows import CurrentRows
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import RowwiseAdam

KEYS = torch.arange(12)


def make_table():
    return MemoryTable("item", 12, 3, RowwiseAdam(), init_scale=0.5)


def buffer_of(table, *keys):
    rows = table.read(torch.tensor(keys))
    return RowBuffer(torch.tensor(keys), rows.weights_UD.clone(), dict(rows.state))


@pytest.fixture
def flight():
    """Step 4 runs one buffer ahead; step 3 has updated row 2 and not written it back."""
    plain, table = make_table(), make_table()
    grads = torch.ones(1, 3)
    plain.apply(torch.tensor([2]), grads, 0.1)
    buffers = {3: buffer_of(table, 2, 5), 4: buffer_of(table, 5, 7), 5: buffer_of(table, 2, 7, 9)}
    buffers[3].update(table.optimizer, torch.cat([grads, torch.zeros(1, 3)]), 0.1)
    plain.apply(torch.tensor([5]), torch.zeros(1, 3), 0.1)
    buffers[4].copy_rows(buffers[3], torch.tensor([1]), torch.tensor([0]))
    rows = CurrentRows(table, lambda: dict(buffers), nullcontext, lambda: 1)
    rows.step = 4
    return plain, table, buffers, rows


def test_reads_see_the_newest_row(flight):
    plain, table, _, rows = flight
    assert torch.equal(rows.gather(KEYS), plain.gather(KEYS))
    assert not torch.equal(table.gather(KEYS), plain.gather(KEYS))


def test_an_update_reaches_the_table_and_every_buffer(flight):
    plain, table, buffers, rows = flight
    keys, grads = torch.tensor([1, 2, 7, 9]), torch.randn(4, 3)
    plain.apply(keys, grads, 0.1)
    rows.apply(keys, grads, 0.1)
    for step in (3, 4):  # written back at any later time
        table.write(buffers[step].keys_U, buffers[step].rows())
    buffers[5].copy_rows(buffers[4], torch.tensor([1]), torch.tensor([1]))  # synchronised
    expected, found, ahead = plain.read(KEYS), table.read(KEYS), buffers[5]
    assert torch.equal(found.weights_UD, expected.weights_UD)
    assert torch.equal(ahead.weights_UD, expected.weights_UD[[2, 7, 9]])
    for name, value in expected.state.items():
        assert torch.equal(found.state[name], value)
        assert torch.equal(ahead.state[name], value[[2, 7, 9]])
