"""Which runs a study has, in which order, and whether a run is finished: one JSON file per run.

The file holds a digest of everything that decides the run's numbers, so a study whose recipe or
data has changed does its runs again. Touch this when the order or the digest changes.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.staleness.cases import Case
from benchmarks.staleness.variants import Variant, named_variants
from slipstream.errors import SlipstreamError
from slipstream.files import read_json
from slipstream.training.recipe import Recipe

RESULTS = "results"


@dataclass(frozen=True)
class Planned:
    """One training: a case by a variant with a seed."""

    case: Case
    variant: Variant
    seed: int
    store_digest: str

    @property
    def name(self) -> str:
        return f"{self.case.name}-{self.variant.name}-seed{self.seed}"

    def recipe(self) -> Recipe:
        """Make the case's recipe with the variant's settings and this seed."""
        sections: dict[str, Any] = {**self.case.recipe, "name": self.name, "seed": self.seed}
        for section, changes in self.variant.settings.items():
            sections[section] = {**sections.get(section, {}), **changes}
        return Recipe.model_validate(sections)

    def digest(self) -> str:
        """Digest everything that decides the numbers."""
        content = self.recipe().model_dump(mode="json", exclude={"name", "data"})
        content_key = json.dumps([content, self.variant.name, self.store_digest], sort_keys=True)
        return hashlib.sha256(content_key.encode()).hexdigest()

    def result_path(self, out: Path) -> Path:
        return out / RESULTS / f"{self.name}.json"

    def result(self, out: Path) -> dict[str, Any] | None:
        """Return the result of the run where it was done with the same digest."""
        path = self.result_path(out)
        if not path.exists():
            return None
        try:
            found = read_json(path)
        except SlipstreamError:
            return None
        return found if isinstance(found, dict) and found.get("digest") == self.digest() else None


def plan(
    cases: Sequence[Case],
    stores: dict[str, str],
    seeds: Sequence[int],
    variants: tuple[str, ...] | None = None,
) -> list[Planned]:
    """Return every run, the most telling first: by the variant's turn, then by seed."""
    runs = [
        Planned(case, variant, seed, stores[case.name])
        for case in cases
        for variant in named_variants(variants or case.variants)
        if variant.name in case.variants
        for seed in seeds[: variant.most_seeds]
    ]
    places = {case.name: place for place, case in enumerate(cases)}
    return sorted(runs, key=lambda run: (run.variant.turn, run.seed, places[run.case.name]))
