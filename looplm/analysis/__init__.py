"""What each loop does: one recorded pass of a model, then pure functions on what it left behind.

Reading order: `trace` (the pass: states of every loop and layer) -> `readout` (answers of every loop) -> `agreement`,
`probes`, `geometry` (on a trace) -> `lens` (every position of one prompt) -> `interventions` (passes with edited
states) -> `runs`, `power_law`, `scaling` (no model: losses of many runs). `prompts` reads what a model is asked;
`layers_as_loops` lets all of it look into a dense model.

Shapes add to the legend of `looplm.model`: N recorded points, C possible answers, P prompts.
"""
