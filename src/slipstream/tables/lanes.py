"""A lane: one process group with buffers of its own, over which ranks swap uneven messages.

One message per peer and per swap, whatever it holds; the buffers grow to the largest message and stay. A lane carries one swap at a
time: work that should overlap takes lanes on different groups (`Lane(other_group)`), each used by one thread.
"""

import torch
import torch.distributed as dist


class Lane:
    """All-to-all, all-gather and sums of one process group, in the group's rank order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, purpose: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """`size` elements of reused memory; what it held under the same purpose is gone."""
        wanted = size * dtype.itemsize
        held = self._buffers.get(purpose)
        if held is None or held.numel() < wanted:
            held = self._buffers[purpose] = torch.empty(max(wanted + wanted // 4, 4096), dtype=torch.uint8)
        return held[:wanted].view(dtype)

    def swap_counts(self, counts_WC: torch.Tensor) -> torch.Tensor:
        """Row w of `counts_WC` goes to rank w; row w of the answer came from rank w."""
        received_WC = torch.empty_like(counts_WC)
        dist.all_to_all_single(received_WC, counts_WC.contiguous(), group=self.group)
        return received_WC

    def swap(self, sent: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], purpose: str) -> torch.Tensor:
        """One message to and from every rank; the answer lies in the lane's buffer until the next swap of this purpose."""
        received = self.buffer(purpose, sum(receive_sizes), sent.dtype)
        width = sent.dtype.itemsize
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [size * width for size in receive_sizes],
            [size * width for size in send_sizes],
            group=self.group,
        )
        return received

    def gather_counts(self, counts_C: torch.Tensor) -> torch.Tensor:
        """[world, C]: everybody's counts."""
        gathered_WC = torch.empty(self.world, counts_C.numel(), dtype=counts_C.dtype)
        dist.all_gather_into_tensor(gathered_WC, counts_C.contiguous(), group=self.group)
        return gathered_WC

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """In place: the sum over the ranks, the same bits on all of them."""
        dist.all_reduce(values, group=self.group)
        return values
