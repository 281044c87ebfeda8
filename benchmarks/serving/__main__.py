"""`python -m benchmarks.serving`."""

from benchmarks.command import run_function
from benchmarks.serving.command import measure

if __name__ == "__main__":
    run_function(measure)
