"""`python -m benchmarks.staleness`."""

from benchmarks.command import run_function
from benchmarks.staleness.command import staleness

if __name__ == "__main__":
    run_function(staleness)
