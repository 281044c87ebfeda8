"""`python -m benchmarks.balance`."""

from benchmarks.balance.bench import __doc__ as text
from benchmarks.balance.bench import run
from benchmarks.command import run_measurement

if __name__ == "__main__":
    run_measurement(run, text)
