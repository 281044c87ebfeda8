"""`python -m benchmarks.negative_quality`."""

from benchmarks.command import run_function
from benchmarks.negative_quality.command import negative_quality

if __name__ == "__main__":
    run_function(negative_quality)
