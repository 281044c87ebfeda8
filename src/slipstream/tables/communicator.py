"""A communicator: one process group with its own buffers, for messages of uneven sizes.

Touch this when ranks must exchange something in a new way. A swap sends one message to each peer,
whatever it holds. Buffers grow to the largest message and are reused. A communicator runs one
collective at a time: work that overlaps uses communicators on different groups
(`Communicator(other_group)`), each from one thread.
"""

import math

import torch
import torch.distributed as dist


class Communicator:
    """All-to-all, all-gather and sums of one process group, in the group's rank order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, purpose: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `size` elements of memory, shared by all buffers of this purpose."""
        needed = size * dtype.itemsize
        memory = self._buffers.get(purpose)
        if memory is None or memory.numel() < needed:
            memory = torch.empty(max(needed + needed // 4, 4096), dtype=torch.uint8)
            self._buffers[purpose] = memory
        return memory[:needed].view(dtype)

    def swap_counts(self, counts_WC: torch.Tensor) -> torch.Tensor:
        """Send row w of `counts_WC` to rank w; row w of the result comes from rank w."""
        received_WC = torch.empty_like(counts_WC)
        dist.all_to_all_single(received_WC, counts_WC.contiguous(), group=self.group)
        return received_WC

    def swap(
        self, sent: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], purpose: str
    ) -> torch.Tensor:
        """Swap one message with every rank; the next swap of this purpose overwrites the result."""
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

    def share(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """All-gather tensors whose first axes may differ between ranks; a list per rank."""
        counts_WC = self.gather_counts(
            torch.tensor([len(tensor) for tensor in tensors], dtype=torch.int64)
        ).tolist()
        mine = torch.cat(
            [torch.empty(0, dtype=torch.uint8), *(_bytes(tensor) for tensor in tensors)]
        )
        sizes = [
            sum(n * _row_bytes(tensor) for n, tensor in zip(row, tensors, strict=True))
            for row in counts_WC
        ]
        sent = self.buffer("shared out", mine.numel() * self.world, torch.uint8)
        sent.view(self.world, mine.numel()).copy_(mine)
        arrived = self.swap(sent, [mine.numel()] * self.world, sizes, "shared").split(sizes)
        return [
            _unpack(message, row, tensors) for message, row in zip(arrived, counts_WC, strict=True)
        ]

    def gather_counts(self, counts_C: torch.Tensor) -> torch.Tensor:
        """All-gather counts; [world, C]."""
        gathered_WC = torch.empty(self.world, counts_C.numel(), dtype=counts_C.dtype)
        dist.all_gather(list(gathered_WC), counts_C.contiguous(), group=self.group)
        return gathered_WC

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks in place; every rank gets the same bits."""
        dist.all_reduce(values, group=self.group)
        return values


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _unpack(
    message: torch.Tensor, counts: list[int], like: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Copy one rank's tensors out of its message, so that each is aligned and keeps its value."""
    sizes = [count * _row_bytes(tensor) for count, tensor in zip(counts, like, strict=True)]
    parts = zip(message.split(sizes), counts, like, strict=True)
    return [
        part.clone().view(tensor.dtype).view(count, *tensor.shape[1:])
        for part, count, tensor in parts
    ]
