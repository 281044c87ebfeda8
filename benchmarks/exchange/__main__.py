"""`python -m benchmarks.exchange`."""

from benchmarks.command import run_measurement
from benchmarks.exchange.bench import __doc__ as text
from benchmarks.exchange.bench import run

if __name__ == "__main__":
    run_measurement(run, text)
