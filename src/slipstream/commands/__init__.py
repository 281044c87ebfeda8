"""The commands, one file per group; `slipstream.cli` gathers them."""
