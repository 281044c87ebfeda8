"""How long the command line and `import slipstream` take to start, each in a fresh process.

`help_s` is the median of `slipstream --help`, `import_s` that of `import slipstream`; what an empty
Python needs is printed with them and not subtracted; `help_vs_python` and `import_vs_python` are
their ratios to it, which travel between machines better than seconds. Touch this when another start
matters.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import run_measurement
from slipstream.bench import harness

REPEATS, QUICK_REPEATS = 21, 5
LIMIT_SECONDS = 60
STARTS = {
    "slipstream --help": ("-m", "slipstream", "--help"),
    "slipstream --version": ("-m", "slipstream", "--version"),
    "import slipstream": ("-c", "import slipstream"),
    "python alone": ("-c", "pass"),
}


def start(words: tuple[str, ...]) -> None:
    """Run one fresh Python process to its end."""
    subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=LIMIT_SECONDS)


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure every start in turn, print a table, write the JSON if a path is given."""
    repeats = QUICK_REPEATS if quick else REPEATS
    variants = {name: partial(start, words) for name, words in STARTS.items()}
    samples = harness.interleave(variants, repeats=repeats)
    rows = [
        {
            "variant": name,
            "seconds": harness.median(taken),
            "spread": harness.spread(taken),
            "samples": taken,
        }
        for name, taken in samples.items()
    ]
    alone = harness.median(samples["python alone"])
    claims = {
        "help_s": harness.median(samples["slipstream --help"]),
        "import_s": harness.median(samples["import slipstream"]),
    }
    claims |= {
        "help_vs_python": claims["help_s"] / alone,
        "import_vs_python": claims["import_s"] / alone,
    }
    return harness.finish("startup", rows, claims, json_path)


if __name__ == "__main__":
    run_measurement(run, __doc__)
