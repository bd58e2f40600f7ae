"""From dense to looped, from few layers to many, and out again; and the check that each step has changed nothing.

Reading order: `dense_source` (what lies in a dense checkpoint) -> `dense_to_looped`, `shared_layers` -> `upcycling`
-> `exporting` -> `trace`, `parity` (what each side computes, and where they part).
"""
