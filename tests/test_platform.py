"""On Windows one sentence at import says what to do."""

import subprocess
import sys

IMPORT = """
import sys
sys.platform = "win32"
try:
    import slipstream
except ImportError as error:
    print(error)
"""


def test_windows_gets_one_sentence_at_import():
    ended = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "Slipstream runs on Linux and macOS; on Windows use WSL 2\n"
    assert ended.stderr == ""
