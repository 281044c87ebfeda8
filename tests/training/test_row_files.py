"""Row files: the newest file that has a row decides."""

import pytest
import torch
from safetensors.torch import load_file

from slipstream.errors import SlipstreamError
from slipstream.tables.embedding_table import Rows
from slipstream.training import row_files
from slipstream.training.row_files import RowPiece, list_row_files, live_rows, write_pieces


def piece(keys, value):
    rows = Rows(torch.full((len(keys), 3), float(value)), {"sum": torch.full((len(keys),), value)})
    return RowPiece("item", torch.tensor(keys), rows)


@pytest.fixture
def chain(tmp_path):
    """Three checkpoints' rows, and what a dictionary would hold of them."""
    for number, pieces in enumerate(
        (
            [piece([1, 2, 3], 1), piece([8, 9], 1)],
            [piece([2, 8], 2), RowPiece("item", torch.tensor([3, 9]))],
            [piece([9, 4], 3), RowPiece("item", torch.tensor([1]))],
        )
    ):
        write_pieces(tmp_path, number, 0, pieces)
    return tmp_path, {2: 2, 8: 2, 9: 3, 4: 3}


def files_in(directory):
    return list_row_files(directory, [path.name for path in directory.glob("rows-*")])


def held(pieces):
    keys = [key for each in pieces for key in each.keys_U.tolist()]
    assert len(keys) == len(set(keys))  # each row once
    return {
        key: int(value)
        for each in pieces
        for key, value in zip(each.keys_U.tolist(), each.rows.weights_UD[:, 0], strict=True)
    }


@pytest.mark.parametrize("num_rows", [10, None])
def test_the_newest_file_decides(chain, num_rows):
    directory, expected = chain
    assert held(list(live_rows(files_in(directory), num_rows, all_of))) == expected


def all_of(keys_U):
    return torch.ones_like(keys_U).bool()


@pytest.mark.parametrize("dtype", list(row_files._DTYPES))
def test_files_are_those_of_safetensors(tmp_path, dtype):
    values = (torch.arange(24) % 2).to(dtype).view(6, 4)
    tensors = {"a": values, "b": values[:, 1], "c": values[:0]}
    row_files.write_row_file(tmp_path / "file", tensors)
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("name", ["../rows-00000000-00000-00000-item.safetensors", "x", 7])
def test_a_checkpoint_names_only_its_own_row_files(tmp_path, name):
    with pytest.raises(SlipstreamError, match="not a readable checkpoint: it names"):
        list_row_files(tmp_path, [name])
