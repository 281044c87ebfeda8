"""`python -m slipstream` with torch's global generator seeded; run by tests/same_as_before.py.

No number of ours comes from that generator, but checkpoints hold its state, which torch begins at
random.
"""

import runpy

import torch

if __name__ == "__main__":
    torch.manual_seed(0)
    runpy.run_module("slipstream", run_name="__main__", alter_sys=True)
