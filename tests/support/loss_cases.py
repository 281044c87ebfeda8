"""Seeded operands of the retrieval losses, shared by the tests of every back-end."""

from collections.abc import Callable

import torch

from slipstream.ops import losses


class LossCase:
    """Operands of a loss, and the losses as functions of hidden states and rows alone."""

    def __init__(self, tokens: int, num_rows: int, width: int, negatives: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.hidden_TD = torch.randn(tokens, width, generator=g)
        self.rows_UD = torch.randn(num_rows, width, generator=g)
        self.targets_T = torch.randint(num_rows, (tokens,), generator=g)
        self.negatives_TR = torch.randint(num_rows, (tokens, negatives), generator=g)
        self.negatives_R = torch.randint(num_rows, (negatives,), generator=g)
        self.target_log_q_T = torch.randn(tokens, generator=g)
        self.negative_log_q_TR = torch.randn(tokens, negatives, generator=g)
        self.negative_log_q_R = torch.randn(negatives, generator=g)

    def sampled(self, corrected: bool, temperature: float) -> Callable[..., torch.Tensor]:
        """Each token against its own negatives, `corrected` by log_q or not."""
        log_q = {"negative_log_q_TR": self.negative_log_q_TR}
        return self._loss(
            losses.sampled_softmax_loss, self.negatives_TR, log_q, corrected, temperature
        )

    def shared(self, corrected: bool, temperature: float) -> Callable[..., torch.Tensor]:
        """All tokens against one set of negatives, `corrected` by log_q or not."""
        log_q = {"negative_log_q_R": self.negative_log_q_R}
        return self._loss(
            losses.shared_softmax_loss, self.negatives_R, log_q, corrected, temperature
        )

    def full(self, temperature: float) -> Callable[..., torch.Tensor]:
        """Each token against all rows."""
        return lambda hidden_TD, rows_UD, *, backend: losses.full_softmax_loss(
            hidden_TD, rows_UD, self.targets_T, temperature=temperature, backend=backend
        )

    def _loss(
        self,
        loss: Callable[..., torch.Tensor],
        negatives: torch.Tensor,
        log_q: dict[str, torch.Tensor],
        corrected: bool,
        temperature: float,
    ) -> Callable[..., torch.Tensor]:
        log_q = log_q | {"target_log_q_T": self.target_log_q_T} if corrected else {}

        def operator(
            hidden_TD: torch.Tensor, rows_UD: torch.Tensor, *, backend: str
        ) -> torch.Tensor:
            options = {name: value.to(hidden_TD.dtype) for name, value in log_q.items()}
            return loss(
                hidden_TD, rows_UD, self.targets_T, negatives, temperature=temperature,
                backend=backend, **options,
            )  # fmt: skip

        return operator
