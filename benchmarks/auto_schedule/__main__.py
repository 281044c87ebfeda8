"""`python -m benchmarks.auto_schedule`."""

from benchmarks.auto_schedule.bench import __doc__ as text
from benchmarks.auto_schedule.bench import run
from benchmarks.command import run_measurement

if __name__ == "__main__":
    run_measurement(run, text)
