"""Measurements that a user makes of the own machine: `slipstream bench NAME`.

Touch this folder when such a measurement is added; its command is listed in cli/bench_commands.py.
Comparisons with peers and studies are in the project's folder benchmarks/.
"""
