"""Sixteen-bit transport reports its error, and rounds rows by themselves."""

import pytest
import torch
import torch.distributed as dist

from slipstream.errors import SlipstreamError
from slipstream.tables.exchange import Exchange
from slipstream.tables.transport import Transport
from tests.support.ranks_fixtures import run_ranks
from tests.support.table_samples import batch_keys, shared_tables


def check_transport(rank, world, kind):
    every = {table.name: table for table in shared_tables(torch.float32)}
    exact, rounded = (
        Exchange(every, dist.group.WORLD),
        Exchange(every, dist.group.WORLD, transport=kind),
    )
    keys, found = batch_keys(rank, 0), {}
    for name, exchange in (("exact", exact), ("rounded", rounded)):
        route = exchange.route(keys)
        lookups = exchange.answer(
            route, {name: every[name].gather(owned) for name, owned in route.owned.items()}
        )
        draw = torch.Generator().manual_seed(rank)
        for lookup in lookups.values():
            lookup.rows_UD.grad = torch.randn(lookup.rows_UD.shape, generator=draw) * 1e-9
        found[name] = (
            lookups["item"].rows_UD.detach(),
            exchange.collect(route, lookups)["item"][1],
        )
    row_error, grad_error = (
        (a - b).abs().max() for a, b in zip(found["exact"], found["rounded"], strict=True)
    )
    report = rounded.transport.report()
    assert exact.transport.report() == {}
    assert 0 < float(row_error) <= report["rows"]["max_error"] * 1.01 + 1e-12
    return [report["rows"]["relative"], report["gradients"]["relative"], float(grad_error)]


@pytest.mark.system
@pytest.mark.parametrize(("kind", "bound"), [("fp16", 2**-10), ("bf16", 2**-7)])
def test_sixteen_bit_transport_reports_its_error(tmp_path, kind, bound):
    for rows, grads, grad_error in run_ranks(2, f"{__name__}:check_transport", tmp_path, kind=kind):
        assert (
            0 < rows < bound and 0 < grads < bound
        )  # gradients of 1e-9 survive fp16, whose smallest number is 6e-8
        assert 0 < grad_error < 1e-9 * 10 * bound


class Loopback:
    """A communicator of one rank: what is sent arrives."""

    def buffer(self, purpose, size, dtype):
        return torch.empty(size, dtype=dtype)

    def swap(self, sent, send_sizes, receive_sizes, purpose):
        return sent.clone()


@pytest.mark.parametrize(
    ("kind", "relative"), [("exact", 0.0), ("fp16", 2**-11), ("bf16", 2**-8), ("half", 2**-11)]
)
def test_values_arrive_within_the_precision_of_their_format(kind, relative):
    transport = Transport(kind, [torch.float32])
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    arrived = transport.swap(Loopback(), values.clone(), [60, 40], [60, 40], "rows")
    assert ((arrived - values).abs() <= relative * values.abs() + 1e-7).all()
    assert (transport.report() == {}) == (kind == "exact")


def test_scaled_messages_keep_tiny_and_huge_values():
    values = torch.tensor([3e-12, -1e-12, 5e9, 1e9])
    arrived = Transport("fp16", [torch.float32]).swap(Loopback(), values, [2, 2], [2, 2], "rows")
    assert torch.allclose(arrived, values, rtol=2**-10)


def test_an_unknown_format_is_refused_with_a_guess():
    with pytest.raises(SlipstreamError, match="did you mean 'bf16'"):
        Transport("bf61", [torch.float32])


def test_the_widest_table_decides_the_type_of_messages():
    assert Transport("exact", [torch.float16, torch.float64]).wide == torch.float64
    assert Transport("exact", [torch.float16]).wide == torch.float32
