"""The choice of a back-end: an argument, then SLIPSTREAM_BACKEND, then what serves the tensors."""

import pytest
import torch

from slipstream.ops import backend, native

FP32, FP64, META = torch.ones(1), torch.ones(1).double(), torch.ones(1, device="meta")


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """Kernels are there, and the environment asks for nothing."""
    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.delenv("SLIPSTREAM_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_by_default_native_serves_fp32_on_a_cpu_and_triton_an_accelerator(monkeypatch):
    assert backend.choose(None, FP32) == "native"
    assert backend.choose(None, FP64) == "reference"
    assert backend.choose(None, FP32, has_native=False) == "reference"
    assert backend.choose(None, META, has_triton=True) == "triton"
    assert backend.choose(None, META) == "reference"
    monkeypatch.setattr(native, "available", lambda: False)
    assert backend.choose(None, FP32) == "reference"


def test_the_environment_is_followed_where_it_can_be(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_BACKEND", "reference")
    assert backend.choose(None, FP32) == "reference"
    assert backend.choose("native", FP32) == "native"
    monkeypatch.setenv("SLIPSTREAM_BACKEND", "native")
    assert backend.choose(None, FP64) == "reference"


def test_an_argument_that_cannot_be_followed_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="needs fp32 tensors on a CPU"):
        backend.choose("native", FP64)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        backend.choose("triton", FP32, has_triton=True)
    with pytest.raises(ValueError, match=r"unknown back-end 'nativ'.*native"):
        backend.choose("nativ", FP32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.choose("triton", FP32, has_triton=True) == "triton"
