"""Installed peers and Slipstream on the same data, in one table: `python -m benchmarks.arena`.

Touch this folder to add a contender, a data set or a column; peers/ holds what runs in processes of
its own.
"""
