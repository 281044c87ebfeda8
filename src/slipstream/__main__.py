"""`python -m slipstream …` and `torchrun -m slipstream …` are the command itself."""

from slipstream.cli.app import main

if __name__ == "__main__":
    main()
