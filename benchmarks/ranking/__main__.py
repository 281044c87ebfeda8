"""`python -m benchmarks.ranking`."""

from benchmarks.command import run_measurement
from benchmarks.ranking import bench

if __name__ == "__main__":
    run_measurement(bench.run, bench.__doc__)
