"""torch.distributed.checkpoint on files, with its metadata as JSON instead of a pickle.

torch's reader unpickles `.metadata`, which lets whoever wrote a checkpoint run code in whoever
opens it. These two classes keep the same content in `metadata.json` (which tensor, which chunk, in
which file, where) and refuse anything that is not that. Tensors themselves are read by torch with
`weights_only=True`.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from slipstream.errors import SlipstreamError
from slipstream.files import read_json

METADATA = "metadata.json"
FORMAT = 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}


class PlainReader(FileSystemReader):
    """Reads it back; the metadata is parsed once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata = read_metadata(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def read_metadata(path: Path) -> Metadata:
    """The metadata of a checkpoint, checked piece by piece."""
    content = read_json(path / METADATA)
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT}")
        tensors: dict[str, Any] = {}
        stored: dict[MetadataIndex, _StorageInfo] = {}
        for name, entry in content["tensors"].items():
            chunks = []
            for number, each in enumerate(entry["chunks"]):
                offsets, sizes = _numbers(each["offsets"]), _numbers(each["sizes"])
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                stored[MetadataIndex(name, offsets, number)] = _StorageInfo(
                    _inside(each["file"]), *_numbers([each["at"], each["bytes"]])
                )
            properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, _numbers(entry["size"]), chunks)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SlipstreamError(
            f"{path / METADATA} is not the metadata of a checkpoint ({type(error).__name__}: "
            f"{error})"
        ) from error
    return Metadata(tensors, storage_data=stored, storage_meta=StorageMeta())


def _numbers(values: list[int]) -> torch.Size:
    if not isinstance(values, list) or not all(
        isinstance(value, int) and 0 <= value < 1 << 62 for value in values
    ):
        raise ValueError(f"{values!r} is not a list of sizes")
    return torch.Size(values)


def _inside(name: str) -> str:
    """Return the name of a file in the checkpoint's directory; refuse any other path."""
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not a file of the checkpoint")
    return name
