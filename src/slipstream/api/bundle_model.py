"""A bundle as Python uses it: the answers of a server without a server.

    model = ss.load("bundles/shop", data="data/shop")
    model.recommend("c/0042")
    model.recommend(histories=[["LAM/0001", "RUG/0002"]])

Touch this when a bundle alone should answer something; what runs answer too is in predictor.py.
"""

import os
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from slipstream.api.predictor import Predictor
from slipstream.bundle import Bundle, read_bundle
from slipstream.data.store import SequenceStore, Vocabulary
from slipstream.display import card
from slipstream.errors import SlipstreamError


class BundleModel(Predictor):
    """An exported model; `data` is the store whose users can be asked about, if any."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        data: str | os.PathLike[str] | SequenceStore | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._bundle = read_bundle(self.directory)
        if isinstance(data, str | os.PathLike):
            data = SequenceStore.open(Path(data))
        self._data = data

    @property
    def bundle(self) -> Bundle:
        return self._bundle

    @property
    def data(self) -> SequenceStore | None:
        return self._data

    @cached_property
    def items(self) -> Vocabulary:
        path = self._bundle.items_path
        try:
            with pa.memory_map(str(path), "r") as source:
                batch = pa.ipc.open_file(source).get_batch(0)
            titles = batch.column("title") if "title" in batch.schema.names else None
            return Vocabulary(batch.column("id"), titles, "item")
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise SlipstreamError(
                f"the item vocabulary {path} cannot be read ({error}); export the bundle again"
            ) from error

    @property
    def version(self) -> str:
        """The digest of everything that decides a score."""
        return self._bundle.version

    def _facts(self) -> dict[str, object]:
        recipe = self._bundle.recipe
        return {
            "model": f"{recipe['model']['kind']}, width {recipe['model']['dim']}",
            "task": recipe["task"],
            "items": self._bundle.description["sizes"]["num_items"],
            "repeat": self._bundle.repeat,
            "version": self.version,
        }

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"BundleModel({str(self.directory)!r}: {facts})"

    def _repr_html_(self) -> str:
        return card(f"Bundle {self.directory}", self._facts())
