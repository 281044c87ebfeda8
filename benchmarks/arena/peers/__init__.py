"""The contenders' scripts: each runs in a process and, but for Slipstream's, an environment.

Touch this folder to add a peer; contest_io.py says what a script reads and writes.
"""
