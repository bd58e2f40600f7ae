"""Quality at every depth: one recorded pass over held-out text, then pure functions on what it left behind.

Reading order: `record` (the pass) -> `bootstrap` (uncertainty over documents) -> `depth_sweep` (fixed depths) ->
`exit_rules` (gate, hidden change, confidence, oracle, in one form) -> `exit_curve` (the gate's thresholds: depth,
quality, cost) -> `exit_area` (one figure for each rule's curve, rule against rule) -> `depth_quality` (does the gate
beat fixed depths?) -> `groups` (accuracy and depth by kind of question).

Shapes add to the legend of `looplm.model`: N recorded tokens, M documents, Q thresholds, W bootstrap resamples.
"""
