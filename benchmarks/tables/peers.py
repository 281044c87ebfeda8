"""Peers of the tables benchmark: torch's EmbeddingBag with SparseAdam, and FBGEMM's table.

Touch this when another peer should be compared.
"""

import importlib.util
from typing import Any

import torch


class SparseAdamBag:
    """torch's own sparse path: one bag per key, sparse gradients, SparseAdam over them."""

    def __init__(self, weights_ND: torch.Tensor) -> None:
        self.bag = torch.nn.EmbeddingBag.from_pretrained(
            weights_ND, freeze=False, mode="sum", sparse=True
        )
        self.optimizer = torch.optim.SparseAdam(self.bag.parameters(), lr=0.1)

    def step_rows(self, keys_U: torch.Tensor, grads_UD: torch.Tensor) -> None:
        """Run the optimiser alone, on gradients that are unique and sorted already."""
        shape = self.bag.weight.shape
        gradient = torch.sparse_coo_tensor(
            keys_U.unsqueeze(0), grads_UD, shape, is_coalesced=True, check_invariants=False
        )
        self.bag.weight.grad = gradient
        self.optimizer.step()

    def step_tokens(self, keys_T: torch.Tensor, grads_TD: torch.Tensor) -> None:
        """Run backward into a sparse gradient with repeated rows, then the optimiser."""
        self.optimizer.zero_grad(set_to_none=True)
        out_TD = self.bag(keys_T, torch.arange(len(keys_T)))
        out_TD.backward(grads_TD)
        self.optimizer.step()


class FbgemmTable:
    """FBGEMM's table with row-wise Adagrad fused into backward; its forward pass is timed too."""

    def __init__(self, num_rows: int, dim: int) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.table: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(num_rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.1,
            eps=1e-8,
        )
        self.table.init_embedding_weights_uniform(-0.035, 0.035)

    def step(self, keys_T: torch.Tensor, grads_TD: torch.Tensor) -> None:
        """Run forward and fused backward of one bag per key."""
        out_TD = self.table(keys_T, torch.arange(len(keys_T) + 1))
        out_TD.backward(grads_TD)


def make_fbgemm(num_rows: int, dim: int) -> FbgemmTable | None:
    """Make FBGEMM's table; None, with one line, where it does not work with this torch."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        print(
            "FBGEMM is not installed (pip install fbgemm-gpu-cpu, in the build made for your "
            "torch): compared without it"
        )
        return None
    try:
        return FbgemmTable(num_rows, dim)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        print(
            f"FBGEMM is installed but does not work here ({str(error).splitlines()[0]}): compared "
            "without it"
        )
        return None
