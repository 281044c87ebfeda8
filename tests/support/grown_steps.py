"""The steps of a run over a store that grows, done without a stop: what such a run must equal."""

from slipstream.data.store import SequenceStore
from slipstream.training.features import NumberEdges
from slipstream.training.loop import train_step
from slipstream.training.negatives import UniformNegatives
from slipstream.training.optimizers import make_adamw
from slipstream.training.ranks import ALONE
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender
from slipstream.training.run import make_sampler


def steps_without_a_stop(
    recipe: Recipe,
    base: SequenceStore,
    grown: SequenceStore,
    before: int,
    after: int,
    edges: NumberEdges | None = None,
) -> Recommender:
    """Train `before` steps on the base and up to `after` in all on the grown store.

    One recommender has rows for all items from the start; `edges` are between its bins of numbers.
    """
    recommender = Recommender.build(recipe, grown, edges=edges)
    optimizer = make_adamw(recommender.model, recipe.optimizer)
    sampler = make_sampler(recipe, base, ALONE)
    recommender.negatives = UniformNegatives(base.num_items)
    for step in range(after):
        if step == before:
            state = sampler.state_dict()
            sampler = make_sampler(recipe, grown, ALONE)
            sampler.load_state_dict(state)
            assert sampler.state_dict()["step"] == 0
            recommender.negatives = UniformNegatives(grown.num_items)
        train_step(recommender, optimizer, sampler.next_batch(), step, after)
    return recommender
