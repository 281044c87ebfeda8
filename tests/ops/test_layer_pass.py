"""A pass of compiled layers equals the layers' own forward; no row feels its neighbours."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.models.backbone import pass_tokens
from slipstream.ops import native
from slipstream.ops.layer_pass import can_run
from tests.support.layer_pass_cases import (
    backbone,
    check_all,
    check_pass,
    layout_of,
    tokens_of,
)
from tests.support.models_samples import KINDS
from tests.support.processes import run_python

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels")


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_layers_with_and_without_a_past_and_in_fewer_bits(kind):
    check_all([kind])


@pytest.mark.parametrize(
    ("time_bias", "encoding"), [("next", "buckets"), ("next", "functional"), ("none", "buckets")]
)
def test_every_bias_equals_the_layers(time_bias, encoding):
    for kind in ("hstu", "fuxi"):
        net = backbone(kind, time_bias=time_bias, time_encoding=encoding, position_bias=False)
        layout = layout_of([120, 7], [20, 3])
        layout = replace(layout, query_timestamps_T=layout.timestamps_T + 777)
        check_pass(net, tokens_of(net, 127), layout)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_both_activations_equal_the_layers(activation):
    net = backbone("sasrec", activation=activation, ffn_multiplier=2.5)
    check_pass(net, 4 * tokens_of(net, 80), layout_of([80]))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_wanted_tokens_have_the_bits_of_the_whole_pass(kind):
    net, layout = backbone(kind), layout_of([60, 5, 90], [20, 2, 0])
    x_TD = tokens_of(net, 155)
    layers = net.compiled(x_TD)
    assert layers is not None
    tokens = pass_tokens(layout, None)
    whole_TD = layers.run(x_TD, tokens)
    last_TD = layers.run(x_TD, tokens, wanted=[20, 2, 1])
    assert torch.equal(last_TD, whole_TD[[*range(40, 60), 63, 64, 154]])
    assert layers.run(x_TD, tokens, wanted=[0, 0, 0]).shape == (0, 32)
    first_TD = layers.run(x_TD, tokens, layers=range(1))
    assert torch.equal(layers.run(first_TD, tokens, layers=range(1, 2)), whole_TD)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind):
    net, layout = backbone(kind), layout_of([200, 30], [50, 3])
    x_TD, before = tokens_of(net, 230), torch.get_num_threads()
    torch.set_num_threads(1)
    alone_TD, _ = net(x_TD, layout)
    torch.set_num_threads(3)
    try:
        together_TD, _ = net(x_TD, layout)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone_TD, together_TD)


def test_gradients_and_doubles_are_left_to_the_layers():
    x_TD = torch.zeros(3, 4)
    assert not can_run(x_TD)
    with torch.no_grad():
        assert can_run(x_TD) and not can_run(x_TD.double())


@torch.no_grad()
def test_a_frozen_model_is_compiled_once():
    net = backbone("hstu")
    x_TD = tokens_of(net, 4)
    assert net.compiled(x_TD) is not net.compiled(x_TD)
    net.freeze()
    assert net.compiled(x_TD) is net.compiled(x_TD)


@pytest.mark.system
@pytest.mark.parametrize("level", ["baseline", "avx2"])
def test_other_instruction_sets_equal_the_layers(level):
    folder = Path(os.environ.get("SLIPSTREAM_NATIVE_DIR") or Path(native.__file__).parent)
    if not list(folder.glob(f"_native_{level}.*so")):
        pytest.skip(f"level {level} was not built on this machine")
    code = (
        "from tests.support.layer_pass_cases import check_all\n"
        "from slipstream.ops import native\n"
        f"assert '{level}' in native.status(), native.status()\n"
        "check_all()\n"
        "print('equal')\n"
    )
    assert run_python(code, SLIPSTREAM_NATIVE_LEVEL=level) == "equal"
