"""Work that a schedule must refuse because it would silently change the result.

Each refusal names the way out. Touch this when a schedule, a table or a loss gets a new limit.
"""

from collections.abc import Mapping

from slipstream.errors import SlipstreamError
from slipstream.pipeline.schedule import Schedule
from slipstream.pipeline.work import Work
from slipstream.tables.embedding_table import EmbeddingTable


def refuse_unsafe_work(
    schedule: Schedule, work: Work, tables: Mapping[str, EmbeddingTable]
) -> None:
    """Raise where this schedule would not compute what the plain loop computes."""
    if schedule.cuts_batches and work.mixes_samples is not None:
        raise SlipstreamError(
            f"schedule '{schedule.name}' cuts a batch into micro-batches, but "
            f"{work.mixes_samples} mixes its samples, so the "
            "objective would change; use schedule=dual_buffer, or a loss that does not mix "
            "samples such as sampled_softmax"
        )
    if schedule.staleness and work.on_demand is not None:
        raise SlipstreamError(
            f"schedule '{schedule.name}' updates rows while later steps compute, but rows of table "
            f"'{work.on_demand.table}' are read on demand (loss.fetch=segmented), at once; use an "
            "exact schedule such as train.schedule=nested, or loss.fetch=whole"
        )
    for table in tables.values():
        if table.optimizer.updates_untouched_rows:
            raise SlipstreamError(
                f"schedule '{schedule.name}' keeps the rows of a step in a buffer, but optimizer "
                f"'{table.optimizer.name}' of table '{table.name}' updates rows that no batch "
                "touched; use tables.optimizer=rowwise_adam or rowwise_adagrad, or the plain loop "
                "(train.schedule=synchronous)"
            )
        if table.forgets and schedule.buffers_ahead:
            raise SlipstreamError(
                f"schedule '{schedule.name}' retrieves rows ahead, but table '{table.name}' may "
                "forget rows (admission or "
                "eviction) in between; use schedule=frozen_window or synchronous, or keep every row"
            )
