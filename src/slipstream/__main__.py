"""`python -m slipstream …` and `torchrun -m slipstream …` are the command itself."""

from slipstream.cli import main

if __name__ == "__main__":
    main()
