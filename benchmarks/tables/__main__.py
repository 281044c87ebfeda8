"""`python -m benchmarks.tables`."""

from benchmarks.command import run_measurement
from benchmarks.tables.bench import __doc__ as text
from benchmarks.tables.bench import run

if __name__ == "__main__":
    run_measurement(run, text)
