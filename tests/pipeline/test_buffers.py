"""The rows of one step: where they come from, what is read of them, and what is updated."""

import torch

from slipstream.pipeline.buffers import RowBuffer
from slipstream.pipeline.hazards import sources
from slipstream.tables.embedding_table import Rows
from slipstream.tables.row_optimizers import RowwiseAdagrad


def buffer_of(keys, value):
    """Rows that hold `value`, with an Adagrad state of as much."""
    count = len(keys)
    state = {name: torch.full_like(v, value) for name, v in empty_state(count).items()}
    return RowBuffer(torch.tensor(keys), torch.full((count, 2), float(value)), state)


def empty_state(count):
    return RowwiseAdagrad().new_state(count, 2, torch.float32, torch.zeros)


def test_rows_come_from_the_table_or_from_an_earlier_buffer_with_their_state():
    earlier, keys = buffer_of([2, 5, 9], 7.0), torch.tensor([1, 5, 9])
    origin = sources(keys, {3: earlier.keys_U})
    assert origin.rest_R.tolist() == [0]
    rest = Rows(torch.ones(1, 2), {name: v + 1 for name, v in empty_state(1).items()})
    buffer = RowBuffer.from_table(keys, origin.rest_R, rest)
    buffer.copy_from(origin, {3: earlier})
    assert buffer.weights_UD[:, 0].tolist() == [1.0, 7.0, 7.0]
    for value in buffer.state.values():
        assert value.flatten().tolist() == [1.0, 7.0, 7.0]
    assert torch.equal(buffer.rows().weights_UD, buffer.weights_UD)


def test_older_weights_are_read_while_the_newest_are_updated():
    buffer = buffer_of([1, 5, 9], 4.0)
    buffer.read_older(torch.tensor([5, 6]), torch.tensor([[-1.0, -1.0], [0.0, 0.0]]))
    assert buffer.read(torch.tensor([0, 1, 2]))[:, 0].tolist() == [4.0, -1.0, 4.0]
    buffer.update(RowwiseAdagrad(), torch.zeros(3, 2), lr=1.0)
    assert buffer.weights_UD[:, 0].tolist() == [4.0, 4.0, 4.0]


def test_what_was_read_is_a_copy():
    buffer = buffer_of([1, 5], 4.0)
    read = buffer.read(torch.tensor([1]))
    buffer.update(RowwiseAdagrad(), torch.ones(2, 2), lr=1.0)
    assert read.tolist() == [[4.0, 4.0]] and float(buffer.weights_UD[1, 0]) < 4.0
