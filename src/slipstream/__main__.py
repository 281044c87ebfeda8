"""`python -m slipstream …` and `torchrun -m slipstream …`: the command `slipstream`.

Touch nothing here: the commands are in cli/app.py.
"""

from slipstream.cli.app import main

if __name__ == "__main__":
    main()
