"""`python -m benchmarks.serving`."""

from benchmarks.command import run_measurement
from benchmarks.serving.bench import __doc__ as text
from benchmarks.serving.bench import run

if __name__ == "__main__":
    run_measurement(run, text)
