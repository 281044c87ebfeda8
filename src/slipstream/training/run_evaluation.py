"""Evaluates a run and keeps what was found in its run.json, from which the report is drawn.

    test                  figures by the recipe's own rules
    test_slices           the same by history length and by popularity of the target
    test_samples          what a few users would have been recommended, beside what they did
    test_sampled, test_no_request_time, test_repeat_allow, test_as_served …   other protocols

Touch this when an evaluation should leave more behind.
"""

from pathlib import Path
from typing import Any, Literal

from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json
from slipstream.training.evaluation import Evaluation, evaluate_in_detail, evaluate_sampled
from slipstream.training.held_out import Which, held_out_behaviours
from slipstream.training.own_functions import NO_FUNCTIONS, OwnFunctions
from slipstream.training.recipe import Recipe
from slipstream.training.recommendation import recommend
from slipstream.training.recommender import Recommender
from slipstream.training.report import write_report

EvaluationProtocol = Literal["full", "sampled", "no_request_time"]
SAMPLES = 3  # users whose recommendations are kept
SAMPLE_ITEMS = 5
RANKED_CATALOGUE = 20_000  # a ranking model scores a catalogue up to this size for a sample


def evaluate_run(
    directory: Path,
    recipe: Recipe,
    store: SequenceStore,
    recommender: Recommender,
    split: Which = "test",
    *,
    protocol: EvaluationProtocol = "full",
    repeat: Literal["exclude", "allow"] | None = None,
    own: OwnFunctions = NO_FUNCTIONS,
) -> Evaluation:
    """Evaluate an opened run, write what was found to run.json and draw the report again.

    `repeat` evaluates by another rule than the recipe's, `own` adds metrics.
    """
    own.check(recipe)
    if protocol != "full" and recipe.task != "retrieval":
        raise SlipstreamError(
            f"protocol '{protocol}' ranks items, so it needs a retrieval run; leave it out"
        )
    if protocol == "sampled" and own.metrics:
        raise SlipstreamError("own metrics see the whole catalogue; leave protocol='sampled' out")
    if protocol == "sampled" and repeat is not None:
        raise SlipstreamError(
            "the sampled protocol filters nothing, so repeat does not apply to it; leave one out"
        )
    asked = recipe.model_copy(update={"repeat": repeat or recipe.repeat})
    if protocol == "sampled":
        done = Evaluation(evaluate_sampled(recommender, store, asked, split))
    else:
        hidden = protocol == "no_request_time"
        done = evaluate_in_detail(
            recommender, store, asked, split, hide_request_time=hidden, own=own
        )
    if not done.figures["users"]:
        raise SlipstreamError(
            f"no user has a behaviour that split.{split} holds out, so there is nothing to "
            "evaluate; change split (with split.by=last, make its numbers smaller)"
        )
    ending = "" if protocol == "full" else f"_{protocol}"
    if asked.repeat != recipe.repeat:
        ending += f"_repeat_{asked.repeat}"
    found: dict[str, Any] = {f"{split}{ending}": done.figures}
    if not ending:
        found[f"{split}_slices"] = done.slices
        found[f"{split}_samples"] = sample_recommendations(recipe, store, recommender, split)
    record_evaluation(directory, found)
    return done


def record_evaluation(directory: Path, found: dict[str, Any]) -> None:
    """Add what an evaluation found to run.json and draw the report again."""
    write_json(directory / "run.json", {**read_json(directory / "run.json"), **found})
    write_report(directory)


def sample_recommendations(
    recipe: Recipe, store: SequenceStore, recommender: Recommender, split: Which
) -> list[dict[str, Any]]:
    """Return, for a few users, the latest history, the best items and what the user did then.

    Items are titles, or ids where the data has no titles.
    """
    if recipe.task == "ranking" and store.num_items > RANKED_CATALOGUE:
        return []
    held_out = held_out_behaviours(store, recipe, split)
    chosen = sorted({len(held_out) * (2 * n + 1) // (2 * SAMPLES) for n in range(SAMPLES)})
    answers = recommend(
        recommender,
        store,
        held_out.users_S[chosen].numpy(),
        SAMPLE_ITEMS,
        known=held_out.known_S[chosen].numpy(),
        request_times=held_out.times_S[chosen].numpy(),
    )

    def name(row: int) -> str:
        return store.items.title(row) or str(store.items.id(row))

    return [
        {
            "user": str(store.users.id(answer.user)),
            "history": [name(row) for row in answer.history[::-1][:SAMPLE_ITEMS]],
            "recommended": [name(row) for row in answer.items],
            "truth": name(target),
            "hit": answer.items.index(target) + 1 if target in answer.items else None,
        }
        for answer, target in zip(answers, held_out.items_S[chosen].tolist(), strict=True)
    ]
