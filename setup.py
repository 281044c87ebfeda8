"""Builds the native kernels: one plain C library per instruction set.

`slipstream.ops.native` chooses one at run time. They include no torch header, so one build works
with every torch. Every extension is optional: without a compiler, or for an instruction set the
compiler does not know, the install still succeeds and the reference back-end serves.

Touch this when the kernels need another flag or instruction set.
"""

import glob
import os
import platform

from setuptools import Extension, setup

COMMON = [
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-ffp-contract=fast",
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

setup(
    ext_modules=[
        Extension(
            f"slipstream.ops._native_{level}",
            sources=sorted(glob.glob("native/*.cpp")),
            depends=sorted(glob.glob("native/*.h")),
            extra_compile_args=COMMON + flags,
            extra_link_args=["-fopenmp"],
            language="c++",
            optional=True,
        )
        for level, flags in LEVELS.items()
    ]
)
