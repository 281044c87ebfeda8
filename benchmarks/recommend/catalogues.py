"""The catalogues of the recommend benchmark: item rows drawn by seed, written as bundles by tile.

Touch this when the protocol asks for other rows.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from slipstream.bundle import StreamedTensor, write_bundle
from slipstream.models.build import build_model
from slipstream.models.model_config import ModelConfig
from slipstream.ops.row_readers import TILE, NormalizedRows, RowReader, RowTile

Kind = Literal["random", "clustered", "lengths"]
WIDTH, CENTRES = 64, 1_000
MODEL: dict[str, Any] = {"kind": "hstu", "dim": WIDTH, "blocks": 2, "heads": 2, "max_len": 1_024}


class DrawnRows:
    """Item rows that are drawn again whenever they are read, a tile of them at a time."""

    def __init__(self, kind: Kind, count: int) -> None:
        self._kind, self._count = kind, count
        generator = torch.Generator().manual_seed(0)
        self._centres_ND = torch.randn(CENTRES, WIDTH, generator=generator)

    @property
    def shape(self) -> tuple[int, int]:
        return self._count, WIDTH

    def take(self, rows_C: torch.Tensor) -> torch.Tensor:
        """Return single rows: draws their tiles."""
        found_CD = torch.empty(len(rows_C), WIDTH)
        for begin, rows_TD in self.tiles():
            mine = (rows_C >= begin) & (rows_C < begin + len(rows_TD))
            found_CD[mine] = rows_TD[rows_C[mine] - begin]
        return found_CD

    def tiles(self) -> Iterator[RowTile]:
        """Draw all rows, tile by tile."""
        for begin in range(0, self._count, TILE):
            count = min(TILE, self._count - begin)
            generator = torch.Generator().manual_seed(1 + begin)
            rows_CD = torch.randn(count, WIDTH, generator=generator)
            if self._kind == "clustered":
                chosen_C = torch.randint(0, CENTRES, (count,), generator=generator)
                rows_CD = self._centres_ND[chosen_C] + 0.5 * rows_CD
            elif self._kind == "lengths":
                rows_CD *= torch.exp(0.5 * torch.randn(count, 1, generator=generator))
            yield begin, rows_CD


def write_catalogue(directory: Path, kind: Kind, count: int) -> RowReader:
    """Write the bundle of a catalogue; return the rows that queries are compared with."""
    rows, normalize = DrawnRows(kind, count), kind != "lengths"
    searched: RowReader = NormalizedRows(rows) if normalize else rows
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = build_model(ModelConfig.model_validate(MODEL), "retrieval", (), (), ())
    tensors: dict[str, Any] = {f"model/{name}": each for name, each in net.state_dict().items()}
    tensors["tables/item"] = StreamedTensor(
        rows.shape, torch.float32, lambda: (tile_CD for _, tile_CD in rows.tiles())
    )
    recipe = {"task": "retrieval", "model": MODEL, "loss": {"normalize": normalize}}
    sizes = {"num_items": count, "item_cardinalities": {}, "user_cardinalities": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.arrow"
        batch = pa.record_batch({"id": pa.array(np.arange(count))})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        write_bundle(directory, recipe, sizes, tensors, path, search=searched, force=True)
    return searched
