"""The engine: encodes histories, computes prefixes, ranks behind them, retrieves."""
