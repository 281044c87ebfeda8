"""A bundle: a trained recommender as plain files, written by training and read by serving.

Touch this when serving needs something more from training.

    bundle.json           format, recipe, sizes, labels and bins of user features, figures;
                          `version` is a digest of everything that decides an answer
    weights.safetensors   dense parameters (`model/…`), table rows (`tables/…`), item feature codes
                          (`codes/…`; with `offsets/…` where an item has several), pretrained
                          vectors of items (`vectors/…`), the most popular items of the log by
                          window of days (`popular/…`; 0: all of it)
    items.arrow           the vocabulary: original id, title and features of every item row
    search.safetensors    8-bit codes of a large catalogue and their bounds, for the first pass of a
                          search; absent where a catalogue is small
    blocks.safetensors    a digest of every block of the two files of tensors

It is written by streaming and opened by mapping, so tables may be larger than memory. Description
and vocabulary are checked at opening, a block of tensors before its first use. Nothing in it is
executable and nothing is pickled, so a bundle from elsewhere can be opened safely.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from slipstream.block_files import DIGEST_BYTES, MappedTensors, file_digest, write_blocks
from slipstream.block_files import StreamedTensor as StreamedTensor
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_directory, check_output, read_json
from slipstream.ops.row_readers import RowReader, TensorRows
from slipstream.ops.topk import QuantizedRows, block_maxima, code_width, quantize_tile

# 1: without rules of answering, without features that have several values; 2: without digests
FORMAT = 3
READABLE = (1, 2, 3)
DESCRIPTION, WEIGHTS, ITEMS = "bundle.json", "weights.safetensors", "items.arrow"
SEARCH, BLOCKS = "search.safetensors", "blocks.safetensors"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle."""

    directory: Path
    description: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]
    tables: Mapping[str, RowReader] = field(default_factory=dict)  # of rows that are elsewhere
    codes: MappedTensors | None = None

    @property
    def items_path(self) -> Path:
        return self.directory / ITEMS

    @property
    def version(self) -> str:
        return str(self.description["version"])

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe it was trained with."""
        recipe: dict[str, Any] = self.description["recipe"]
        return recipe

    @property
    def repeat(self) -> str:
        """Whether an item the user has seen may be recommended: "exclude" or "allow"."""
        return str(self.recipe.get("repeat", "exclude"))

    @property
    def window(self) -> str:
        """Which part of a long history the model sees: "latest" or "stepped"."""
        return str(self.recipe.get("window", "stepped"))

    @property
    def max_len(self) -> int:
        """How many behaviours of a history the model sees: as many as in training."""
        longest = int(self.recipe["model"]["max_len"])
        if "window" not in self.recipe:  # an older bundle
            return longest
        return min(longest, int(self.recipe.get("sampler", {}).get("max_len", longest)))

    @property
    def timed(self) -> bool:
        """Whether the log it was trained on had times; without, every time is 0."""
        return bool(self.description["sizes"].get("timed", True))

    def part(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors below `prefix/`, without it."""
        return {
            name.removeprefix(f"{prefix}/"): self.tensors[name]
            for name in self.tensors
            if name.startswith(f"{prefix}/")
        }

    def rows(self, table: str) -> RowReader:
        """The rows of a table, which may be larger than memory."""
        if table in self.tables:
            return self.tables[table]
        name = f"tables/{table}"
        if isinstance(self.tensors, MappedTensors):
            return self.tensors.rows(name)
        return TensorRows(self.tensors[name])

    def check_files(self, largest: int) -> None:
        """Check every block of the files of tensors that have no more than `largest` bytes."""
        for file in (self.tensors, self.codes):
            if isinstance(file, MappedTensors) and file.path.stat().st_size <= largest:
                file.check(0, file.path.stat().st_size)

    def search_codes(self) -> QuantizedRows | None:
        """The 8-bit codes by which the catalogue is searched, checked; None where it has none."""
        if self.codes is None:
            return None
        return QuantizedRows(*(self.codes[name] for name in _CODES))


def content_version(description: dict[str, Any], digests: torch.Tensor) -> str:
    """Compute the digest of all that decides a score; equal versions give equal scores.

    `digests` are those of the blocks of the weights.
    """
    digest = hashlib.blake2b(
        json.dumps(description, sort_keys=True).encode(), digest_size=DIGEST_BYTES
    )
    digest.update(digests.contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_bundle(
    directory: str | Path,
    recipe: dict[str, Any],
    sizes: dict[str, Any],
    tensors: Mapping[str, torch.Tensor | StreamedTensor],
    items: Path,
    *,
    search: RowReader | None = None,
    user_labels: dict[str, list[str]] | None = None,
    number_edges: dict[str, list[float]] | None = None,
    force: bool = False,
    inputs: Iterable[str | os.PathLike[str]] = (),
    **figures: Any,
) -> str:
    """Write a bundle, whole or not at all, and return its version.

    Of `search`, the rows that queries are compared with, the codes of a first pass are written.
    `user_labels` are the texts of a user feature's codes, `number_edges` lie between the bins of a
    table's numbers. `figures` (metrics, step) are recorded but do not change the version. An older
    bundle in `directory` is replaced with `force`; nothing else is ever replaced, least of all
    one of the `inputs`.
    """
    check_output(directory, "bundle", force=force, inputs=inputs)
    features = {"user_labels": user_labels or {}, "number_edges": number_edges or {}}
    described = {"format": FORMAT, "recipe": recipe, "sizes": sizes, **features}
    with atomic_directory(directory) as temporary:
        by_size = sorted(tensors.items(), key=lambda each: (-each[1].dtype.itemsize, each[0]))
        digests = {WEIGHTS: write_blocks(temporary / WEIGHTS, dict(by_size))}
        if search is not None:
            digests[SEARCH] = write_blocks(temporary / SEARCH, _streamed_codes(search))
        write_blocks(temporary / BLOCKS, digests)
        shutil.copyfile(items, temporary / ITEMS)
        version = content_version(_deciding(described), digests[WEIGHTS])
        description = {
            "format": FORMAT,
            "version": version,
            "sizes": sizes,
            **figures,
            "recipe": recipe,
            **features,
            "digests": {name: file_digest(temporary / name) for name in (ITEMS, BLOCKS)},
        }
        (temporary / DESCRIPTION).write_text(
            json.dumps(description, indent=2) + "\n", encoding="utf-8"
        )
    return version


_CODES = ("codes", "scales", "errors", "norms", "block_norms")


def _streamed_codes(rows: RowReader) -> dict[str, StreamedTensor]:
    """Return the 8-bit codes of rows; their bounds are known once the codes were written."""
    count, width = rows.shape
    scales_N, errors_N, norms_N = (torch.zeros(count) for _ in range(3))
    blocks = tuple(block_maxima(norms_N).shape)

    def codes() -> Iterator[torch.Tensor]:
        for begin, rows_CD in rows.tiles():
            part = slice(begin, begin + len(rows_CD))
            codes_CS = torch.zeros(len(rows_CD), code_width(width), dtype=torch.int8)
            quantize_tile(rows_CD, codes_CS, scales_N[part], errors_N[part], norms_N[part])
            yield codes_CS

    def later(shape: tuple[int, ...], find: Callable[[], torch.Tensor]) -> StreamedTensor:
        return StreamedTensor(shape, torch.float32, lambda: iter([find()]))

    return {
        "codes": StreamedTensor((count, code_width(width)), torch.int8, codes),
        "scales": later((count,), lambda: scales_N),
        "errors": later((count,), lambda: errors_N),
        "norms": later((count,), lambda: norms_N),
        "block_norms": later(blocks, lambda: block_maxima(norms_N)),
    }


def _deciding(description: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a description that decides an answer."""
    names = ("format", "sizes", "user_labels", "number_edges")
    kept = {name: description[name] for name in names}
    return kept | {"recipe": _deciding_keys(description["recipe"])}


def _deciding_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a recipe that decides an answer."""
    names = ("task", "tasks", "model", "loss", "repeat", "window")
    kept = {name: recipe[name] for name in names if name in recipe}
    if "max_len" in recipe.get("sampler", {}):
        kept["sampler"] = {"max_len": recipe["sampler"]["max_len"]}
    return kept


def read_bundle(directory: str | Path) -> Bundle:
    """Open a bundle; anything else is a SlipstreamError."""
    directory = Path(directory)
    if not (directory / DESCRIPTION).is_file():
        raise SlipstreamError(
            f"{directory} is not a bundle (no {DESCRIPTION}); make one with `slipstream export "
            f"RUN --out {directory}`"
        )
    description = read_json(directory / DESCRIPTION)
    if not isinstance(description, dict) or description.get("format") not in READABLE:
        raise SlipstreamError(
            f"{directory} is not a bundle of format {' or '.join(map(str, READABLE))}; export it "
            "again"
        )
    try:
        if description["format"] < 3 and "digests" not in description:  # else it was changed
            return Bundle(directory, description, load_file(directory / WEIGHTS))
        return _open_checked(directory, description)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise SlipstreamError(
            f"the weights of bundle {directory} cannot be read ({error}); export it again"
        ) from error


def _open_checked(directory: Path, description: dict[str, Any]) -> Bundle:
    """Open a bundle with digests: description and vocabulary are checked now, tensors later."""
    for name in (ITEMS, BLOCKS):
        if file_digest(directory / name) != description["digests"][name]:
            raise SlipstreamError(
                f"{directory / name} was changed after it was written, so it is not used; export "
                "the bundle again"
            )
    digests = load_file(directory / BLOCKS)
    if content_version(_deciding(description), digests[WEIGHTS]) != description["version"]:
        raise SlipstreamError(
            f"{directory / DESCRIPTION} was changed after it was written, so it is not used; "
            "export the bundle again"
        )
    mapped = {name: MappedTensors(directory / name, digests[name]) for name in digests}
    return Bundle(directory, description, mapped[WEIGHTS], codes=mapped.get(SEARCH))
