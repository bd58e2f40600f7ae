"""Weighted sources in turn: a fixed order in which every source keeps its share at every moment, not on average."""

from collections.abc import Sequence

from looplm.errors import UserError


class Interleaving:
    """Endless sequence of source numbers, in which after any n draws source i was drawn within 1 of weight_i * n.

    Drawing sources at random would leave a source of 1 % unseen for hundreds of rows and make the mixture of a short
    stage a matter of luck. Taking always the source that is furthest behind comes close, but for many sources can
    fall behind by more than one. This is the earliest deadline among those that may be drawn (Tijdeman, "The chairman
    assignment problem", Discrete Mathematics 32, 1980), which keeps every source within 1 - 1 / (2 (K - 1)).

    Args:
        weights: K shares, positive; they are divided by their sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or min(weights) <= 0:
            raise UserError(f"The weights of a mixture must be positive, and are {list(weights)}.")
        self.weights = [weight / sum(weights) for weight in weights]
        self.counts = [0] * len(weights)

    def draw(self) -> int:
        """The source of the next row."""
        if len(self.weights) == 1:
            self.counts[0] += 1
            return 0
        slack = 1 / (2 * (len(self.weights) - 1))
        num_drawn = sum(self.counts) + 1
        best, best_deadline = 0, float("inf")
        for source, (weight, count) in enumerate(zip(self.weights, self.counts, strict=True)):
            deficit = weight * num_drawn - count
            deadline = (1 - slack - deficit) / weight
            # The margin keeps rounding from excluding a source that stands exactly at its bound.
            if deficit >= slack - 1e-9 and deadline < best_deadline - 1e-9:
                best, best_deadline = source, deadline
        self.counts[best] += 1
        return best
