"""`python -m benchmarks.recommend`."""

from benchmarks.command import run_measurement
from benchmarks.recommend.bench import run

if __name__ == "__main__":
    run_measurement(run, run.__doc__)
