"""Comparisons with peers, and studies: `python -m benchmarks.NAME` from the project's root.

Touch this folder to measure something against others; README.md lists what is here.
"""
