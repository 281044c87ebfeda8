"""The compiled library that is loaded: the best of this CPU, or the one the environment names."""

import pytest
import torch

from slipstream.ops import native


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an empty library of every level, named by SLIPSTREAM_NATIVE_DIR."""
    for level in ("avx512", "avx2", "baseline"):
        (tmp_path / f"_native_{level}.test.so").touch()
    monkeypatch.setenv("SLIPSTREAM_NATIVE_DIR", str(tmp_path))
    monkeypatch.delenv("SLIPSTREAM_NATIVE_LEVEL", raising=False)
    return tmp_path


def levels():
    return [path.name.split(".")[0].removeprefix("_native_") for path in native._candidates()]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ("AVX512", ["avx512", "avx2", "baseline"]),
        ("AVX2", ["avx2", "baseline"]),
        ("DEFAULT", ["baseline"]),
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_best_level_this_cpu_can_run_comes_first(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert levels() == expected
    monkeypatch.setenv("SLIPSTREAM_NATIVE_LEVEL", "baseline")
    assert levels() == ["baseline"]


@pytest.mark.usefixtures("folder")
def test_libraries_that_cannot_be_loaded_give_one_warning_and_no_kernels():
    with pytest.warns(UserWarning, match="install g\\+\\+"):
        assert native.library.__wrapped__() is None


def test_an_address_is_that_of_contiguous_memory_of_the_right_dtype():
    x = torch.ones(2, 3)
    assert native.address(x) == native.address(x, torch.float32) == x.data_ptr()
    assert native.address(None) is None
    with pytest.raises(ValueError, match="contiguous"):
        native.address(x.T)
    with pytest.raises(TypeError, match="float32"):
        native.address(x, torch.int64)


def test_the_status_names_the_library_that_serves():
    expected = "_native_" if native.available() else "not built"
    assert expected in native.status()
