"""Quality at every depth: one recorded pass over held-out text, then pure functions on what it left behind.

Reading order: `record` (the pass) -> `bootstrap` (uncertainty over documents) -> `depth_sweep` (fixed depths) ->
`exit_rules` (gate, hidden change, confidence, oracle, in one form) -> `exit_curve` (the gate's thresholds: depth,
quality, cost) -> `exit_area` (one figure for each rule's curve, rule against rule) -> `depth_quality` (does the gate
beat fixed depths?) -> `groups` (accuracy and depth by kind of question).

lm-eval's tasks at every depth: `setting` (one way to run a model) -> `continuation` (all loops of an answer, every
rule applied to it) -> `lm_eval_adapter` (the model as lm-eval asks it) -> `task_plan`, `presets` (what is asked) ->
`task_scores` (one question, many answers) -> `task_sweep` (all tasks at all settings) -> `task_gains`.

Shapes add to the legend of `looplm.model`: N recorded tokens, M documents, Q thresholds, W bootstrap resamples.
"""
