"""Fits of sums of power laws to losses: E + sum_k A_k / (x_k + t_k)^alpha_k, by a robust loss with many restarts.

A fit minimises the Huber loss of log-loss residuals, as is usual for scaling laws (Hoffmann et al., arXiv 2203.15556,
section 3.3). Given exponents and offsets the law is linear in E and the A_k: hundreds of random draws are first solved
for these by non-negative least squares, and the best are then refined in all parameters together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import least_squares, nnls

from looplm.errors import UserError

HUBER_DELTA = 1e-3
"""Residual of the log loss beyond which a point counts linearly."""

MOST_EXPONENT = 4.0
MOST_OFFSET = 10.0
"""In units of the variable's geometric mean."""


@dataclass(frozen=True)
class Term:
    """coefficient / (variable + offset)^exponent; an offset of None is 0."""

    variable: str
    coefficient: str
    exponent: str
    offset: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of its parameters."""
        return (self.coefficient, self.exponent, *([self.offset] if self.offset is not None else []))


@dataclass(frozen=True)
class Law:
    """E plus terms. Every parameter is at least 0."""

    terms: tuple[Term, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all parameters, E first."""
        return ("E", *(name for term in self.terms for name in term.names))

    def predict(self, parameters: Mapping[str, float], values: Mapping[str, np.ndarray]) -> np.ndarray:
        """The loss (n,) at values (n,) of each variable."""
        parts = [
            parameters[term.coefficient]
            * (values[term.variable] + (parameters[term.offset] if term.offset is not None else 0.0))
            ** -parameters[term.exponent]
            for term in self.terms
        ]
        return parameters["E"] + np.sum(parts, axis=0)

    def without_offsets(self) -> "Law":
        """The same law with every offset fixed at 0."""
        return Law(tuple(replace(term, offset=None) for term in self.terms))


LOOP_LAW = Law(
    (
        Term("parameters", "A", "alpha", "t1"),
        Term("tokens", "B", "beta", "t2"),
        Term("loops", "C", "gamma", "t3"),
    )
)
"""E + A/(N+t1)^alpha + B/(D+t2)^beta + C/(T+t3)^gamma (Ouro, appendix D.2): T is the trained depth for the
total loss, the loop whose loss it is for the step-wise one."""

PARCAE_LAW = Law((Term("unrolled_parameters", "A", "a"), Term("tokens", "B", "b")))
"""E + A N^-a + B D^-b, N the parameters of the unrolled model (Parcae, arXiv 2604.12946, section 5.2)."""


@dataclass(frozen=True)
class Points:
    """n measured losses."""

    values: dict[str, np.ndarray]
    """Of each variable, (n,), above 0."""
    loss: np.ndarray
    """(n,) nats, above 0."""
    curves: np.ndarray
    """(n,) integers: points of one number come from one run, whose errors go together."""

    def __len__(self) -> int:
        return len(self.loss)

    def where(self, mask: np.ndarray) -> "Points":
        """The points at which `mask` (n,) is true."""
        return Points({name: column[mask] for name, column in self.values.items()}, self.loss[mask], self.curves[mask])

    def with_loss(self, loss: np.ndarray) -> "Points":
        """Other losses at the same places."""
        return replace(self, loss=loss)


@dataclass(frozen=True)
class Fit:
    """A law with the parameters found."""

    law: Law
    parameters: dict[str, float]
    huber: float
    """Mean Huber loss of the log residuals that was reached."""
    r2: float
    """1 - residual / total sum of squares of the loss, on the fitted points."""
    num_points: int
    free: frozenset[str]
    """Parameters that the points leave open: they may move together without changing a single prediction."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Parameters fixed at 0 because the grid cannot carry them, and why."""

    def predict(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """The loss (n,) at values (n,) of each variable."""
        return self.law.predict(self.parameters, values)


def fit_law(law: Law, points: Points, *, num_starts: int = 300, num_refined: int = 6, seed: int = 0) -> Fit:
    """The parameters of `law` that fit `points` best.

    Terms and offsets that the grid cannot carry are left out and named: a variable with one value is part of E, and an
    offset beside coefficient and exponent needs four values. Raises UserError for too few points.
    """
    carried, dropped = _carried(law, points)
    num_parameters = len(carried.names)
    if len(points) <= num_parameters:
        raise UserError(
            f"{len(points)} losses cannot fit the {num_parameters} parameters {', '.join(carried.names)}. Give more "
            "runs, or more points of each."
        )
    problem = _Problem(carried, points)
    rng = np.random.default_rng(seed)
    starts = sorted((problem.random_start(rng) for _ in range(num_starts)), key=problem.cost)[:num_refined]
    return problem.fit(starts, law, dropped)


def refit(fit: Fit, points: Points) -> Fit:
    """`fit` again on other losses at much the same places, starting from what was found."""
    law = Law(
        tuple(
            replace(term, offset=None if term.offset in fit.dropped else term.offset)
            for term in fit.law.terms
            if term.coefficient not in fit.dropped
        )
    )
    problem = _Problem(law, points)
    return problem.fit([problem.pack(fit.parameters)], fit.law, fit.dropped)


def r_squared(loss: np.ndarray, predicted: np.ndarray) -> float:
    """1 - sum of squared residuals / sum of squared deviations from the mean; 0 of both is a perfect fit."""
    total = float(np.square(loss - loss.mean()).sum())
    residual = float(np.square(loss - predicted).sum())
    return 1 - residual / total if total else float(residual == 0)


def _carried(law: Law, points: Points) -> tuple[Law, dict[str, str]]:
    """The part of the law that the grid can carry, and what was left out."""
    terms, dropped = [], {}
    for term in law.terms:
        levels = len(np.unique(points.values[term.variable]))
        if levels == 1:
            reason = f"all points have the same {term.variable.replace('_', ' ')}: the term is part of E"
            dropped |= dict.fromkeys(term.names, reason)
            continue
        if term.offset is not None and levels < 4:
            dropped[term.offset] = f"{levels} values of {term.variable.replace('_', ' ')} cannot tell it from the rest"
            term = replace(term, offset=None)
        terms.append(term)
    return Law(tuple(terms)), dropped


class _Problem:
    """One least-squares problem in the vector (log E, then log a, exponent and scaled offset of every term).

    `a` is the term's size at the geometric mean of its variable, which takes most of the coupling out of coefficient
    and exponent.
    """

    def __init__(self, law: Law, points: Points) -> None:
        self.law, self.points = law, points
        self.log_loss = np.log(points.loss)
        self.values = [points.values[term.variable] for term in law.terms]
        self.centres = [float(np.exp(np.log(x).mean())) for x in self.values]
        smallest = float(points.loss.min())
        low, high = [np.log(smallest) - 16], [np.log(smallest) + 0.5]
        for term in law.terms:
            low += [np.log(smallest) - 16, 1e-3] + [0.0] * (term.offset is not None)
            high += [np.log(points.loss.max()) + 3, MOST_EXPONENT] + [MOST_OFFSET] * (term.offset is not None)
        self.low, self.high = np.array(low), np.array(high)

    def shapes(self, theta: np.ndarray) -> list[tuple[float, float]]:
        """(exponent, offset) of each term."""
        found, i = [], 1
        for term, centre in zip(self.law.terms, self.centres, strict=True):
            found.append((theta[i + 1], theta[i + 2] * centre if term.offset is not None else 0.0))
            i += len(term.names)
        return found

    def ratios(self, theta: np.ndarray) -> list[np.ndarray]:
        """log((x + t) / (centre + t)) of each term."""
        return [
            np.log((x + offset) / (centre + offset))
            for x, centre, (_, offset) in zip(self.values, self.centres, self.shapes(theta), strict=True)
        ]

    def parts(self, theta: np.ndarray) -> np.ndarray:
        """E and the terms, (1 + terms, n)."""
        rows, i = [np.full(len(self.points), np.exp(theta[0]))], 1
        for term, ratio in zip(self.law.terms, self.ratios(theta), strict=True):
            rows.append(np.exp(theta[i] - theta[i + 1] * ratio))
            i += len(term.names)
        return np.stack(rows)

    def residuals(self, theta: np.ndarray) -> np.ndarray:
        return np.log(self.parts(theta).sum(0)) - self.log_loss

    def jacobian(self, theta: np.ndarray) -> np.ndarray:
        """(n, parameters), of the residuals."""
        parts = self.parts(theta)
        shares = parts / parts.sum(0)
        columns = [shares[0]]
        shapes, ratios = self.shapes(theta), self.ratios(theta)
        for k, term in enumerate(self.law.terms):
            (exponent, offset), x, centre = shapes[k], self.values[k], self.centres[k]
            columns += [shares[k + 1], -ratios[k] * shares[k + 1]]
            if term.offset is not None:
                columns.append(-exponent * centre * (1 / (x + offset) - 1 / (centre + offset)) * shares[k + 1])
        return np.stack(columns, axis=1)

    def cost(self, theta: np.ndarray) -> float:
        """Mean Huber loss."""
        size = np.abs(self.residuals(theta)) / HUBER_DELTA
        return float(np.where(size <= 1, size**2 / 2, size - 0.5).mean() * HUBER_DELTA**2)

    def random_start(self, rng: np.random.Generator) -> np.ndarray:
        """Random exponents and offsets, with the best E and coefficients for them."""
        theta = np.zeros(len(self.low))
        i = 1
        for term in self.law.terms:
            theta[i + 1] = np.exp(rng.uniform(np.log(0.05), np.log(2.0)))
            if term.offset is not None:
                theta[i + 2] = rng.choice([0.0, 1.0]) * np.exp(rng.uniform(np.log(1e-3), np.log(3.0)))
            i += len(term.names)
        basis = self.parts(theta)  # every size 1
        sizes, _ = nnls((basis / self.points.loss).T, np.ones(len(self.points)))
        log_sizes = np.log(np.maximum(sizes, np.exp(self.low[0])))
        theta[0], i = log_sizes[0], 1
        for term, size in zip(self.law.terms, log_sizes[1:], strict=True):
            theta[i] = size
            i += len(term.names)
        return np.clip(theta, self.low + 1e-9, self.high - 1e-9)

    def fit(self, starts: list[np.ndarray], law: Law, dropped: dict[str, str]) -> Fit:
        """Refines the starts and keeps the best."""
        found = [
            least_squares(
                self.residuals, start, self.jacobian,  # pyright: ignore[reportArgumentType]
                bounds=(self.low, self.high), loss="huber", f_scale=HUBER_DELTA,
                x_scale="jac", ftol=1e-12, xtol=1e-12, gtol=1e-14, max_nfev=200,
            ).x
            for start in starts
        ]  # fmt: skip
        theta = min(found, key=self.cost)
        parameters = self.unpack(theta) | dict.fromkeys(dropped, 0.0)
        # A term that is left out predicts nothing: coefficient 0, whatever its exponent.
        predicted = law.predict(parameters, self.points.values)
        return Fit(
            law=law,
            parameters={name: parameters[name] for name in law.names},
            huber=self.cost(theta),
            r2=r_squared(self.points.loss, predicted),
            num_points=len(self.points),
            free=self.free(theta),
            dropped=dropped,
        )

    def unpack(self, theta: np.ndarray) -> dict[str, float]:
        """The law's own parameters."""
        named, i = {"E": float(np.exp(theta[0]))}, 1
        for term, centre, (exponent, offset) in zip(self.law.terms, self.centres, self.shapes(theta), strict=True):
            named[term.exponent] = float(exponent)
            named[term.coefficient] = float(np.exp(theta[i] + exponent * np.log(centre + offset)))
            if term.offset is not None:
                named[term.offset] = float(offset)
            i += len(term.names)
        return named

    def pack(self, parameters: Mapping[str, float]) -> np.ndarray:
        """The vector of the law's own parameters, moved inside the bounds."""
        theta = [np.log(max(parameters["E"], 1e-300))]
        for term, centre in zip(self.law.terms, self.centres, strict=True):
            offset = parameters[term.offset] if term.offset is not None else 0.0
            exponent = parameters[term.exponent]
            theta += [np.log(max(parameters[term.coefficient], 1e-300)) - exponent * np.log(centre + offset), exponent]
            theta += [offset / centre] * (term.offset is not None)
        return np.clip(np.array(theta), self.low + 1e-9, self.high - 1e-9)

    def free(self, theta: np.ndarray) -> frozenset[str]:
        """Parameters with a part in a direction along which no prediction changes."""
        jacobian = self.jacobian(theta)
        norms = np.linalg.norm(jacobian, axis=0)
        names = self.law.names
        scaled = jacobian / np.where(norms > 0, norms, 1.0)
        _, sizes, directions = np.linalg.svd(scaled, full_matrices=True)
        flat = directions[np.append(sizes, np.zeros(len(directions) - len(sizes))) < 1e-7 * sizes.max()]
        in_flat = np.abs(flat).max(axis=0) > 1e-3 if len(flat) else np.zeros(len(names), dtype=bool)
        return frozenset(name for name, open_ in zip(names, in_flat | (norms == 0), strict=True) if open_)
