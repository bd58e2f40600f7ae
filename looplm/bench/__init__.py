"""Measurements that decide something: ours against the obvious way, in one run, in turn, medians of several.

    sizes (what is measured) -> naive (the obvious way) -> sides (one of the two, ready to step)
    -> memory, breakdown (what is read off a step) -> worker (a side in a process of its own)
    -> train (comparison and sweeps) -> tables

`looplm bench` prints them; docs/bench.md holds the figures and what they mean.
"""
