"""Rows of another width than the model's: each kind of them has a linear layer into the token.

Such rows come from tables with a width of their own and from pretrained vectors, which are not
trained themselves. Touch this when rows are brought to the model's width in another way.
"""

from collections.abc import Mapping

import torch
from torch import nn

MIN_ROWS = 8  # rows below which a matrix product may round differently


class InputProjections(nn.Module):
    """A linear layer without bias for every input of another width, by the input's name."""

    def __init__(self, widths: Mapping[str, int], dim: int) -> None:
        super().__init__()
        self.names = list(widths)
        self.layers = nn.ModuleList(nn.Linear(width, dim, bias=False) for width in widths.values())
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All rows by name, those of another width projected."""
        found = dict(rows)
        for name, layer in zip(self.names, self.layers, strict=True):
            if name in rows:
                found[name] = _project(layer, rows[name])
        return found


def _project(layer: nn.Module, x_TE: torch.Tensor) -> torch.Tensor:
    """Project rows so that a row's result does not depend on how many others there are."""
    count = x_TE.shape[0]
    if 0 < count < MIN_ROWS:
        padding = x_TE.new_zeros(MIN_ROWS - count, x_TE.shape[1])
        return layer(torch.cat([x_TE, padding]))[:count]
    return layer(x_TE)
