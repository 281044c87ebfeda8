"""`python -m benchmarks.simulate`; with `reality RANKS TIER` it measures a part of that check."""

import sys

from benchmarks.command import run_function, run_measurement

if __name__ == "__main__":
    if sys.argv[1:2] == ["reality"]:
        from benchmarks.simulate.reality import measure_part

        del sys.argv[1]
        run_function(measure_part)
    else:
        from benchmarks.simulate import bench

        run_measurement(bench.run, bench.__doc__)
