"""One digest of everything a training left: equal digests mean equal bits, on any number of ranks.

Touch this when a checkpoint holds something new.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from slipstream.training.checkpoint import read_dense
from slipstream.training.optimizers import optimizer_tensors
from slipstream.training.recommender import Recommender


def digest_of(dense: Mapping[str, torch.Tensor], recommender: Recommender) -> str:
    """Digest the dense tensors and every row with its state, trained or not.

    Untouched rows count with their initial values, since runs differ in what they touch.
    """
    tensors = dict(dense)
    for table_name, table in recommender.tables.tables.items():
        assert table.num_rows is not None
        rows = table.read(torch.arange(table.num_rows))
        tensors |= {
            f"tables/{table_name}/{name}": value
            for name, value in {"weights": rows.weights_UD, **rows.state}.items()
        }
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().contiguous()
        digest.update(f"\0{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def digest_of_checkpoint(path: Path, recommender: Recommender) -> str:
    """Digest a checkpoint whose weights and rows are loaded into `recommender`."""
    return digest_of(read_dense(path, ("model/", "optimizer/")), recommender)


def digest_in_memory(recommender: Recommender, optimizer: torch.optim.AdamW) -> str:
    """Digest a training that was never saved; its checkpoint would have the same."""
    dense = {f"model/{name}": value for name, value in recommender.model.state_dict().items()}
    dense |= {
        f"optimizer/{name}": value
        for name, value in optimizer_tensors(optimizer, recommender.model).items()
    }
    return digest_of(dense, recommender)
