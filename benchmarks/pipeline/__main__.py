"""`python -m benchmarks.pipeline`."""

from benchmarks.command import run_measurement
from benchmarks.pipeline.bench import __doc__ as text
from benchmarks.pipeline.bench import run

if __name__ == "__main__":
    run_measurement(run, text)
