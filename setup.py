"""Builds the native kernels: one plain C library per instruction set.

`slipstream.ops.native` chooses one at run time. They include no torch header, so one build works
with every torch. Every extension is optional: without a compiler, or for an instruction set the
compiler does not know, the install still succeeds and the reference back-end serves.

GCC and Clang build them. Without OpenMP (Apple's Clang, unless libomp is installed) the kernels
compute the same on one thread, and the build says so.

Touch this when the kernels need another flag or instruction set.
"""

import glob
import os
import platform
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMMON = [
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-maybe-uninitialized",  # GCC 12 warns of its own AVX-512 headers, thousands of lines
]
LEVELS = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS["avx2"] = ["-mavx2", "-mfma", "-mbmi2", "-mf16c"]
    LEVELS["avx512"] = [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mfma",
        "-mbmi2",
        "-mf16c",
    ]

# SLIPSTREAM_NATIVE_LEVEL builds one level only, as it loads one level only.
LEVELS = {
    level: flags
    for level, flags in LEVELS.items()
    if level == os.environ.get("SLIPSTREAM_NATIVE_LEVEL", level)
}

# How a compiler is asked for OpenMP: flags of compiling and of linking, the first that works.
OPENMP = (
    (["-fopenmp"], ["-fopenmp"]),
    (["-Xpreprocessor", "-fopenmp"], ["-lomp"]),  # Apple's Clang with libomp beside it
)
WITHOUT_OPENMP = (["-fopenmp-simd"], [])
# A multiplication and the addition after it become one operation. GCC fuses all it finds. Clang's
# `fast` fuses differently from copy to copy of a loop, and rows would depend on their neighbours;
# its `on` fuses within an expression, the same everywhere.
CONTRACTION = {False: "-ffp-contract=fast", True: "-ffp-contract=on"}
IS_CLANG = """
#if !defined(__clang__)
#error not Clang
#endif
int main() { return 0; }
"""
USES_OPENMP = """
#include <omp.h>
int main() { return omp_get_max_threads() == 0; }
"""


class BuildKernels(build_ext):
    """Builds the kernels with the flags that this compiler takes."""

    def build_extensions(self) -> None:
        compiling, linking = next(
            (flags for flags in OPENMP if self._builds(USES_OPENMP, *flags)), WITHOUT_OPENMP
        )
        if not linking:
            print(
                "this compiler has no OpenMP: the native kernels will use one thread each, so "
                "training is slower by about the number of cores; install libomp (macOS: brew "
                "install libomp) or g++ and build again to have all of them",
            )
        contraction = CONTRACTION[self._builds(IS_CLANG, [], [])]
        for extension in self.extensions:
            extension.extra_compile_args = [*compiling, contraction, *extension.extra_compile_args]
            extension.extra_link_args = linking
        super().build_extensions()

    def _builds(self, source: str, compiling: list[str], linking: list[str]) -> bool:
        """Whether the compiler makes a program of `source` with these flags."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "probe.cpp"
            path.write_text(source)
            try:
                made = self.compiler.compile([str(path)], folder, extra_postargs=compiling)
                self.compiler.link_executable(
                    made, str(Path(folder) / "probe"), extra_postargs=linking, target_lang="c++"
                )
            except Exception:  # of distutils or of setuptools' copy of it: two families of types
                return False
        return True


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            f"slipstream.ops._native_{level}",
            sources=sorted(glob.glob("native/*.cpp")),
            depends=sorted(glob.glob("native/*.h")),
            extra_compile_args=COMMON + flags,
            language="c++",
            optional=True,
        )
        for level, flags in LEVELS.items()
    ],
)
