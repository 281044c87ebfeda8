"""Files of tensors written by streaming and read by mapping, with a digest of every block.

The files are plain safetensors. What is larger than memory is written chunk by chunk; a reader maps
the file and checks each block of `BLOCK_BYTES` against its digest before its first use, so opening
a large file costs nothing. Touch this when the layout or the way of checking changes.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from slipstream.errors import SlipstreamError
from slipstream.ops.row_readers import TILE, RowTile

BLOCK_BYTES = 1 << 16  # small, since single rows are read from anywhere
DIGEST_BYTES = 16
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor that is made when it is written: chunks along its first axis, in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Callable[[], Iterator[torch.Tensor]]

    @classmethod
    def of(cls, value: "torch.Tensor | StreamedTensor") -> "StreamedTensor":
        """Return a tensor as one that is streamed."""
        if isinstance(value, StreamedTensor):
            return value
        return cls(tuple(value.shape), value.dtype, lambda: iter([value]))

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def block_digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of a block."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def file_digest(path: Path) -> str:
    """Return the digest of a whole file, read in parts."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()


def write_blocks(path: Path, tensors: Mapping[str, torch.Tensor | StreamedTensor]) -> torch.Tensor:
    """Write tensors in their order; return the digests of the file's blocks (uint8 [B, 16]).

    Larger types come first, so that every tensor begins at a multiple of its type's size.
    """
    streamed = {name: StreamedTensor.of(value) for name, value in tensors.items()}
    header, end = {}, 0
    for name, value in streamed.items():
        header[name] = {
            "dtype": _NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [end, end + value.nbytes],
        }
        end += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digests, waiting = bytearray(), bytearray()
    with path.open("wb") as file:

        def write(data: bytes | memoryview) -> None:
            file.write(data)
            waiting.extend(data)
            whole = len(waiting) // BLOCK_BYTES * BLOCK_BYTES
            view = memoryview(waiting)
            for begin in range(0, whole, BLOCK_BYTES):
                digests.extend(block_digest(view[begin : begin + BLOCK_BYTES]))
            view.release()
            del waiting[:whole]

        write(len(text).to_bytes(8, "little") + text)
        for name, value in streamed.items():
            written = 0
            for chunk in value.chunks():
                part = chunk.detach().cpu().contiguous().reshape(-1)
                for piece in part.split(BLOCK_BYTES):
                    write(memoryview(piece.view(torch.uint8).numpy()) if piece.numel() else b"")
                written += part.nbytes
            if written != value.nbytes:
                raise ValueError(f"'{name}' has {written} bytes, not {value.nbytes}")
        if waiting:
            digests.extend(block_digest(waiting))
    found = torch.frombuffer(digests, dtype=torch.uint8) if digests else torch.empty(0)
    return found.to(torch.uint8).view(-1, DIGEST_BYTES)


class MappedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a file, mapped. A tensor that is asked for is checked as a whole."""

    def __init__(self, path: Path, digests: torch.Tensor) -> None:
        self.path = path
        self._bytes = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        self._digests = digests.numpy()
        self._checked_B = np.zeros(len(self._digests), dtype=bool)
        if len(self._digests) != -(-len(self._bytes) // BLOCK_BYTES):
            raise OSError(None, "it is cut short")
        self.check(0, 8)
        length = int.from_bytes(self._bytes[:8].numpy().tobytes(), "little")
        self.check(0, 8 + length)
        self._header = json.loads(self._bytes[8 : 8 + length].numpy().tobytes())
        self._body = 8 + length

    def __getitem__(self, name: str) -> torch.Tensor:
        begin, end = self._place(name)
        self.check(begin, end)
        return self._mapped(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def __len__(self) -> int:
        return len(self._header)

    def rows(self, name: str) -> "MappedRows":
        """Return a matrix whose rows are checked as they are read."""
        return MappedRows(self, self._mapped(name), self._place(name)[0])

    def check(self, begin: int, end: int) -> None:
        """Check the blocks that hold the bytes begin … end - 1, those not checked before."""
        self.check_blocks(np.arange(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)))

    def check_blocks(self, blocks: np.ndarray) -> None:
        """Check blocks, those not checked before."""
        for block in blocks[~self._checked_B[blocks]].tolist():
            data = self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].numpy()
            if block_digest(data.data) != self._digests[block].tobytes():
                raise SlipstreamError(
                    f"{self.path} was changed after it was written (block {block}), so it is not "
                    "used; export the bundle again"
                )
            self._checked_B[block] = True

    def _place(self, name: str) -> tuple[int, int]:
        begin, end = self._header[name]["data_offsets"]
        return self._body + begin, self._body + end

    def _mapped(self, name: str) -> torch.Tensor:
        begin, end = self._place(name)
        dtype, shape = _DTYPES[self._header[name]["dtype"]], self._header[name]["shape"]
        return self._bytes[begin:end].view(dtype).view(shape)


class MappedRows:
    """The rows of a mapped matrix; a block is checked before the first of its rows is read."""

    def __init__(self, file: MappedTensors, rows_ND: torch.Tensor, begin: int) -> None:
        self._file, self._rows_ND, self._begin = file, rows_ND, begin
        self._row_bytes = rows_ND.shape[1] * rows_ND.element_size()

    @property
    def shape(self) -> tuple[int, int]:
        return self._rows_ND.shape[0], self._rows_ND.shape[1]

    def take(self, rows_C: torch.Tensor) -> torch.Tensor:
        begins_C = self._begin + rows_C.numpy() * self._row_bytes
        first_C = begins_C // BLOCK_BYTES
        last_C = (begins_C + max(self._row_bytes, 1) - 1) // BLOCK_BYTES
        steps = int((last_C - first_C).max(initial=0)) + 1
        touched = [np.minimum(first_C + step, last_C) for step in range(steps)]
        self._file.check_blocks(np.unique(np.concatenate(touched)))
        return self._rows_ND[rows_C]

    def tiles(self) -> Iterator[RowTile]:
        for begin in range(0, len(self._rows_ND), TILE):
            rows_CD = self._rows_ND[begin : begin + TILE]
            start = self._begin + begin * self._row_bytes
            self._file.check(start, start + rows_CD.nbytes)
            yield begin, rows_CD
