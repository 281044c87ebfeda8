"""`python -m benchmarks.before_after`."""

import benchmarks.before_after.bench as bench
from benchmarks.command import run_measurement

if __name__ == "__main__":
    run_measurement(bench.run, bench.__doc__)
