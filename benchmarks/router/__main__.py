"""`python -m benchmarks.router`."""

from benchmarks.command import run_measurement
from benchmarks.router.bench import __doc__ as text
from benchmarks.router.bench import run

if __name__ == "__main__":
    run_measurement(run, text)
