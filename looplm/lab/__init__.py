"""Controlled experiments on synthetic tasks, where the right answer and the depth it needs are known.

Reading order: `task` (what a task is, its streams) -> `fold` (the smallest) -> `mano`, `multihop`, `reachability_task`
-> `task_evaluation` (accuracy and depth by difficulty). `fold_recipe` trains the quickstart's model; `reachability` is
the theorem's transformer, written down. `capo` measures storage. `study` runs grids of models over any of them.
"""
