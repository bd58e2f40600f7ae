"""Linear probes: at which loop and layer does a state say what the model is going to answer?

One logistic regression for every state (loop and layer) and every target, its ROC AUC measured on data that it was not
fitted to, beside the same for shuffled targets, which must lie at 0.5. A state that predicts its own loop's answer and
not yet the next one's belongs to a computation that is still going on (Ouro, section 7.2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from jaxtyping import Float, Int
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from looplm.analysis.intervals import standard_error
from looplm.analysis.trace import Trace
from looplm.errors import UserError

NUM_FOLDS = 5
REGULARISATION = 0.1
"""C of the logistic regression: strong, since states are wide and prompts few."""


@dataclass(frozen=True)
class Target:
    """Something that probes try to read from a state: an answer for every prompt."""

    name: str
    values: tuple[int, ...]
    """(N,), class numbers."""


@dataclass(frozen=True)
class ProbeGrid:
    """Probes of one target on all states."""

    target: str
    auc: tuple[tuple[float | None, ...], ...]
    """(R, L): cross-validated ROC AUC, averaged over classes; None where there are no two classes to tell apart."""
    stderr: tuple[tuple[float | None, ...], ...]
    """(R, L): standard error of `auc` over folds. Folds share most of what they are fitted to: rather too small."""
    control: tuple[tuple[float | None, ...], ...]
    """The same for shuffled targets."""
    token_auc: float | None
    """What the prompt's last token alone is worth: the AUC of the same probe on its one-hot vector."""
    class_shares: tuple[float, ...]
    """Of the target: AUCs of a rare class are uncertain."""
    note: str
    """Why there is no AUC; empty where there is."""


@dataclass(frozen=True)
class Probes:
    """Every target on every state."""

    grids: tuple[ProbeGrid, ...]
    num_prompts: int
    num_folds: int
    layers: str
    """What the columns are: core layers 1 to L, or "loop state"."""

    @property
    def control_mean(self) -> float:
        """Mean over all shuffled probes."""
        values = [value for grid in self.grids for row in grid.control for value in row if value is not None]
        return mean(values) if values else float("nan")


def answer_targets(answers: Int[Tensor, "R N"], right: Int[Tensor, " N"] | None = None) -> list[Target]:
    """The answer of every loop as a target, and the right one where it is known."""
    targets = [Target(f"answer of loop {loop}", tuple(row.tolist())) for loop, row in enumerate(answers, start=1)]
    return targets if right is None else [*targets, Target("right answer", tuple(right.tolist()))]


def probe_trace(
    trace: Trace,
    targets: Sequence[Target],
    *,
    tokens: Sequence[int] | None = None,
    num_folds: int = NUM_FOLDS,
    seed: int = 0,
) -> Probes:
    """Probes every target on every state of `trace`: its layers where it has them, else what the LM head reads.

    tokens: the token that each state stands on, for the probe of that token alone; none when None.

    Raises UserError for a target that has not one value for each point.
    """
    states = trace.hidden[:, None] if trace.layer_states is None else trace.layer_states  # (R, L, N, D)
    grids = []
    for number, target in enumerate(targets):
        if len(target.values) != trace.num_points:
            raise UserError(f"{target.name} has {len(target.values)} values for {trace.num_points} prompts.")
        grids.append(_probe_grid(states, target, tokens, num_folds, seed + number))
    kind = "loop state" if trace.layer_states is None else "core layer"
    return Probes(tuple(grids), trace.num_points, num_folds, kind)


def _probe_grid(
    states: Float[Tensor, "R L N D"], target: Target, tokens: Sequence[int] | None, num_folds: int, seed: int
) -> ProbeGrid:
    values = np.array(target.values)
    shuffled = np.random.default_rng(seed).permutation(values)
    counts = np.bincount(values)
    note = ""
    if (counts >= num_folds).sum() < 2:
        note = f"fewer than two answers occur at least {num_folds} times, so there is nothing to tell apart"

    def folds(wanted: np.ndarray) -> list[list[list[float]]]:
        return [
            [[] if note else fold_aucs(layer.numpy(), wanted, num_folds=num_folds, seed=seed) for layer in loop]
            for loop in states
        ]

    found = folds(values)
    return ProbeGrid(
        target=target.name,
        auc=_cells(found, mean),
        stderr=_cells(found, standard_error),
        control=_cells(folds(shuffled), mean),
        token_auc=None
        if note or tokens is None
        else probe_auc(_one_hot(tokens), values, num_folds=num_folds, seed=seed),
        class_shares=tuple((counts / len(values)).tolist()),
        note=note,
    )


def _cells(
    folds: list[list[list[float]]], figure: Callable[[Sequence[float]], float]
) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple(figure(layer) if layer else None for layer in loop) for loop in folds)


def _one_hot(tokens: Sequence[int]) -> np.ndarray:
    """(N, distinct tokens)."""
    return np.equal.outer(np.array(tokens), np.unique(tokens)).astype(float)


def probe_auc(states: np.ndarray, values: np.ndarray, *, num_folds: int = NUM_FOLDS, seed: int = 0) -> float | None:
    """Mean of :func:`fold_aucs`; None where less than two classes are left."""
    found = fold_aucs(states, values, num_folds=num_folds, seed=seed)
    return mean(found) if found else None


def fold_aucs(states: np.ndarray, values: np.ndarray, *, num_folds: int = NUM_FOLDS, seed: int = 0) -> list[float]:
    """ROC AUC of a logistic regression from states (N, D) to classes (N,), of each fold by the others.

    Classes with fewer members than folds are left out. With more than two classes it is the mean over one class
    against the rest. Empty where less than two classes are left.
    """
    classes = [
        value for value, count in zip(*np.unique(values, return_counts=True), strict=True) if count >= num_folds
    ]
    if len(classes) < 2:
        return []
    kept = np.isin(values, classes)
    x, y = states[kept].astype(np.float64), values[kept]
    scores = []
    for train, test in StratifiedKFold(num_folds, shuffle=True, random_state=seed).split(x, y):
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=REGULARISATION, max_iter=2000))
        probe.fit(x[train], y[train])
        found = probe.predict_log_proba(x[test])
        # Of two classes either one's AUC is the other's.
        scores.append(mean(float(roc_auc_score(y[test] == value, found[:, i])) for i, value in enumerate(classes)))
    return scores
