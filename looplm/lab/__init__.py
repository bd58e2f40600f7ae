"""Controlled experiments on synthetic tasks, where the right answer and the depth it needs are known.

Reading order: `fold` (a task, its examples and its training stream) -> `fold_evaluation` (accuracy and depth by
difficulty) -> `fold_recipe` (a model and the stages that train it).
"""
