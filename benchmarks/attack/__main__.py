"""`python -m benchmarks.attack`."""

from benchmarks.attack.bench import __doc__ as text
from benchmarks.attack.bench import run
from benchmarks.command import run_measurement

if __name__ == "__main__":
    run_measurement(run, text)
