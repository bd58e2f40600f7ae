"""Training: stages that follow one another, each of them one explicit loop; resumable to the bit.

Reading order: `recipe`, `recipe_file` (what a run is) -> `run` (its stages) -> `trainer` (the loop of one stage) ->
`micro_batches`, `forward` (a step's forward and backward), `depth`, `schedule`, `optimizer`, `layer_wrapping` ->
`divergence`, `gate_alarm`, `telemetry`, `held_out` (what it tells you) -> `checkpoint`, `saving`, `interrupt` (how it
survives a kill) -> `distributed` (how it runs on many devices). `plan` and `memory` work out a run without running it.
"""
