"""`python -m benchmarks.simulate`; with `reality RANKS TIER` it measures a part of that check."""

import sys

from benchmarks.command import run_function

if __name__ == "__main__":
    if sys.argv[1:2] == ["reality"]:
        from benchmarks.simulate.reality import measure_part

        del sys.argv[1]
        run_function(measure_part)
    else:
        from benchmarks.simulate.bench import measure

        run_function(measure)
