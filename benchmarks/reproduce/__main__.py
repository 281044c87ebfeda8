"""`python -m benchmarks.reproduce`."""

from benchmarks.command import run_function
from benchmarks.reproduce.command import reproduce

if __name__ == "__main__":
    run_function(reproduce)
