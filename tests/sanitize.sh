#!/bin/sh
# Runs the operator tests with kernels built under the address and undefined-behaviour sanitizers.
# `make sanitize` calls this with the Python to use. Tests that start processes (Triton's
# interpreter, other instruction sets) are left out: the sanitizer's library slows them down for
# nothing.
set -eu
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
cxx=${CXX:-g++}
build=build/sanitize
flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"

# One instruction set is built and tested: the best of this CPU, or the one given.
if [ -z "${SLIPSTREAM_NATIVE_LEVEL:-}" ]; then
    SLIPSTREAM_NATIVE_LEVEL=$("$python" -c "import torch
best = torch.backends.cpu.get_cpu_capability()
print({'AVX512': 'avx512', 'AVX2': 'avx2'}.get(best, 'baseline'))")
fi
export SLIPSTREAM_NATIVE_LEVEL
echo "operator tests under the sanitizers, instruction set $SLIPSTREAM_NATIVE_LEVEL"
CFLAGS="$flags" CXXFLAGS="$flags" LDFLAGS="$flags" "$python" setup.py -q build_ext \
    --build-lib "$build/lib" --build-temp "$build/temp"
SLIPSTREAM_NATIVE_DIR=$PWD/$build/lib/slipstream/ops
export SLIPSTREAM_NATIVE_DIR
ls "$SLIPSTREAM_NATIVE_DIR"/_native_*.so >/dev/null || { echo "the kernels were not built: is $cxx installed?"; exit 1; }

# Without --capture=sys pytest would swallow the sanitizers' reports.
# The sanitizers must be loaded before Python; libstdc++ too, or they miss its exceptions.
for name in libasan.so libubsan.so libstdc++.so.6; do
    preload="${preload:-} $("$cxx" -print-file-name=$name)"
done
LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    "$python" -m pytest -q --capture=sys -p no:cacheprovider -m "not system and not slow" tests/ops
