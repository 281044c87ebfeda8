"""The rows of an opened run whose tables may be larger than memory: in files that no one else sees.

A run that trained with tables in files is opened with tables in files of its own, loaded from the
checkpoint chunk by chunk. Once they are loaded their directory is removed; the open files live on
without a name until the process ends, however it ends. What a process killed while loading leaves
behind is removed by the next one. Touch this when an opened run keeps its rows in another way.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender

PREFIX = ".opened-rows-"  # of the temporary directories
CACHE_BYTES = 1 << 28  # rows held in memory, at most
_LOCK = "in-use"


def keeps_files(recipe: Recipe) -> bool:
    """Whether the rows of a run are in files."""
    return recipe.tables.directory is not None


@contextlib.contextmanager
def directory_for_rows(run_dir: Path, recipe: Recipe) -> Iterator[Path]:
    """Yield a directory for the rows of an opened run; it is gone when the block ends.

    It lies beside the files of the training tables, where there is room, else in the run or in the
    system's directory of temporary files.
    """
    trained = Path(recipe.tables.directory or run_dir)
    places = [trained, run_dir, Path(tempfile.gettempdir())]
    place = next((each for each in places if each.is_dir() and os.access(each, os.W_OK)), None)
    if place is None:
        raise SlipstreamError(
            f"the rows of {run_dir} need a directory that can be written; make {run_dir} writable"
        )
    remove_left_behind(place)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    try:
        with (directory / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_left_behind(place: Path) -> None:
    """Remove the rows of processes that were killed while they opened a run."""
    for directory in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (directory / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # in use: an error
            shutil.rmtree(directory, ignore_errors=True)


def in_files(recipe: Recipe, directory: Path) -> Recipe:
    """Return the recipe with its tables in files of `directory`, behind a small cache."""
    tables = recipe.tables
    changes = {
        "directory": str(directory),
        "cache_bytes": min(tables.cache_bytes, CACHE_BYTES),
    }
    return recipe.model_copy(update={"tables": tables.model_copy(update=changes)})


def let_go(recommender: Recommender) -> None:
    """Write all rows to their files, which may lose their names now, and close them in the end."""
    weakref.finalize(recommender, recommender.tables.close)
    for table in recommender.tables.tables.values():
        table.flush()
    # What is exported must not name a directory of this machine.
    nowhere = {"tables": recommender.recipe.tables.without_files()}
    recommender.recipe = recommender.recipe.model_copy(update=nowhere)
