"""Training: one explicit loop that draws batches, runs the model, weighs its loops and steps the optimizer.

Reading order: `recipe` (what a stage is) -> `schedule`, `optimizer` -> `trainer` (the loop) -> `telemetry`,
`gate_alarm` (what it tells you) -> `checkpoint` (how it survives a kill).
"""
