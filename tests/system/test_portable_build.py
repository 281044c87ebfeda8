"""The kernels build with Clang, with and without OpenMP, and pass the operators' tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
LEVEL = {"AVX512": "avx512", "AVX2": "avx2"}.get(
    torch.backends.cpu.get_cpu_capability(), "baseline"
)
# Apple's Clang, too, refuses the flag.
REFUSES_OPENMP = """#!/bin/sh
for flag; do
    if [ "$flag" = -fopenmp ]; then echo "unsupported option '-fopenmp'" >&2; exit 1; fi
done
exec clang++ "$@"
"""
OPERATORS = ("attention", "grouped_losses", "losses", "pointwise", "row_gather", "rows")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("clang++") is None, reason="clang++ is not installed"),
]


def build_kernels(folder: Path, compiler: str) -> tuple[Path, str]:
    """Build one instruction set as an install does; return its folder and what the build said."""
    words = [sys.executable, "setup.py", "build_ext"]
    words += ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]

    chosen = {"CC": "clang", "CXX": compiler, "SLIPSTREAM_NATIVE_LEVEL": LEVEL}
    ended = subprocess.run(
        words, cwd=ROOT, env=os.environ | chosen, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder / "lib" / "slipstream" / "ops", ended.stdout


def check_operators(folder: Path) -> None:
    """Run the operators' tests with the kernels of a folder."""
    files = [f"tests/ops/test_{name}.py" for name in OPERATORS]
    words = ["-q", "-p", "no:cacheprovider", "-m", "not system and not slow", *files]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=os.environ | {"SLIPSTREAM_NATIVE_DIR": str(folder), "SLIPSTREAM_NATIVE_LEVEL": LEVEL},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]


def status_of(folder: Path) -> str:
    """Return how the kernels of a folder describe themselves."""
    words = "from slipstream.ops import native; print(native.status())"
    return subprocess.run(
        [sys.executable, "-c", words],
        env=os.environ | {"SLIPSTREAM_NATIVE_DIR": str(folder), "SLIPSTREAM_NATIVE_LEVEL": LEVEL},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_clang_without_openmp_builds_exact_kernels_of_one_thread(tmp_path):
    compiler = tmp_path / "clang-of-a-mac"
    compiler.write_text(REFUSES_OPENMP)
    compiler.chmod(0o755)
    folder, said = build_kernels(tmp_path, str(compiler))
    assert list(folder.glob(f"_native_{LEVEL}.*so"))
    assert "one thread" in said and "slower" in said
    assert "one thread (without OpenMP)" in status_of(folder)
    check_operators(folder)


@pytest.mark.slow
def test_clang_with_openmp_builds_exact_kernels(tmp_path):
    folder, said = build_kernels(tmp_path, "clang++")
    assert list(folder.glob(f"_native_{LEVEL}.*so"))
    if "one thread" in said:
        pytest.skip("clang++ has no OpenMP here: libomp is not installed")
    assert "one thread" not in status_of(folder)
    check_operators(folder)
