"""Peers of the tables benchmark: plain indexing, EmbeddingBag with SparseAdam, FBGEMM's table.

Touch this when another peer should be compared.
"""

import importlib.util
from typing import Any

import torch

LR, EPS, BETAS = 0.1, 1e-8, (0.9, 0.98)  # of every variant


class PlainIndexing:
    """Row-wise optimizers in plain PyTorch: read rows by index, compute, write them back.

    The same arithmetic as ours, with torch's operators alone.
    """

    def __init__(self, weights_ND: torch.Tensor) -> None:
        rows = len(weights_ND)
        self.weights_ND = weights_ND
        self.m_ND, self.v_N = torch.zeros_like(weights_ND), torch.zeros(rows)
        self.sum_N, self.steps_N = torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)

    @torch.no_grad()
    def adagrad(self, keys_U: torch.Tensor, grads_UD: torch.Tensor) -> None:
        """Make one row-wise Adagrad step of unique rows."""
        sum_U = self.sum_N.index_select(0, keys_U) + grads_UD.square().mean(dim=1)
        self.sum_N.index_copy_(0, keys_U, sum_U)
        scale_U = -LR / (sum_U.sqrt() + EPS)
        self.weights_ND.index_add_(0, keys_U, grads_UD * scale_U.unsqueeze(1))

    @torch.no_grad()
    def adam(self, keys_U: torch.Tensor, grads_UD: torch.Tensor) -> None:
        """Make one row-wise Adam step of unique rows."""
        beta1, beta2 = BETAS
        steps_U = self.steps_N.index_select(0, keys_U) + 1
        m_UD = self.m_ND.index_select(0, keys_U).mul_(beta1).add_(grads_UD, alpha=1 - beta1)
        mean_U = grads_UD.square().mean(dim=1)
        v_U = self.v_N.index_select(0, keys_U).mul_(beta2).add_(mean_U, alpha=1 - beta2)
        self.steps_N.index_copy_(0, keys_U, steps_U)
        self.m_ND.index_copy_(0, keys_U, m_UD)
        self.v_N.index_copy_(0, keys_U, v_U)
        correction1_U, correction2_U = 1 - beta1**steps_U, 1 - beta2**steps_U
        scale_U = -LR / (((v_U / correction2_U).sqrt() + EPS) * correction1_U)
        self.weights_ND.index_add_(0, keys_U, m_UD.mul_(scale_U.unsqueeze(1)))

    @staticmethod
    def deduplicated(
        keys_T: torch.Tensor, grads_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the unique keys of token gradients, and the sum of each key's gradients."""
        keys_U, inverse_T = torch.unique(keys_T, return_inverse=True)
        sums_UD = grads_TD.new_zeros(keys_U.numel(), grads_TD.shape[1])
        return keys_U, sums_UD.index_add_(0, inverse_T, grads_TD)


class SparseAdamBag:
    """torch's own sparse path: one bag per key, sparse gradients, SparseAdam over them."""

    def __init__(self, weights_ND: torch.Tensor) -> None:
        self.bag = torch.nn.EmbeddingBag.from_pretrained(
            weights_ND, freeze=False, mode="sum", sparse=True
        )
        self.optimizer = torch.optim.SparseAdam(self.bag.parameters(), lr=LR, betas=BETAS, eps=EPS)

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
            learning_rate=LR,
            eps=EPS,
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
