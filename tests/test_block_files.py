"""Streamed files of tensors come back by mapping; what is touched was checked before."""

import pytest
import torch
from safetensors.torch import load_file

from slipstream import block_files
from slipstream.block_files import BLOCK_BYTES, MappedTensors, StreamedTensor, write_blocks
from slipstream.errors import SlipstreamError

TENSORS = {
    "ids": torch.arange(7),
    "rows": torch.randn(9_000, 6, generator=torch.Generator().manual_seed(1)),
    "half": torch.ones(3, 2, dtype=torch.float16).t(),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([True, False]),
}


def test_tensors_come_back_here_and_in_safetensors(tmp_path):
    digests = write_blocks(tmp_path / "t", TENSORS)
    assert len(digests) == -(-(tmp_path / "t").stat().st_size // BLOCK_BYTES)
    mapped, plain = MappedTensors(tmp_path / "t", digests), load_file(tmp_path / "t")
    assert list(mapped) == list(TENSORS) and plain.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(mapped[name], value) and torch.equal(plain[name], value)


def test_only_touched_blocks_are_read(tmp_path, monkeypatch):
    digests = write_blocks(tmp_path / "t", TENSORS)
    digests[1:] = 0  # every block but the first seems changed
    rows = MappedTensors(tmp_path / "t", digests).rows("rows")
    early_C = torch.tensor([5, 0, 5])
    assert torch.equal(rows.take(early_C), TENSORS["rows"][early_C])
    within = BLOCK_BYTES // 24  # a row that begins in the first block and ends in the second
    for touch in (lambda: rows.take(torch.tensor([within])), lambda: next(rows.tiles())):
        with pytest.raises(SlipstreamError, match=r"was changed after .* \(block 1\)"):
            touch()


def test_what_does_not_fit_its_announcement_is_refused(tmp_path):
    short = StreamedTensor((3, 2), torch.float32, lambda: iter([torch.ones(2, 2)]))
    with pytest.raises(ValueError, match="'x' has 16 bytes, not 24"):
        write_blocks(tmp_path / "t", {"x": short})
    digests = write_blocks(tmp_path / "t", TENSORS)
    with pytest.raises(OSError, match="cut short"):
        MappedTensors(tmp_path / "t", digests[:-1])
    assert block_files.file_digest(tmp_path / "t") == block_files.file_digest(tmp_path / "t")
