"""`python -m benchmarks.negatives`."""

from benchmarks.command import run_measurement
from benchmarks.negatives.bench import __doc__ as text
from benchmarks.negatives.bench import run

if __name__ == "__main__":
    run_measurement(run, text)
