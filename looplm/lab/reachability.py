"""Graph reachability by a looped transformer that is written down, not trained (Ouro, theorem 2 and appendix B.5).

A directed graph of n vertices is the union of a hidden one, which lives in the weights, and a context one, which is
the input. Which vertices can be reached from which? One layer with one head and width 2n answers all pairs after
1 + ceil(log2(max(1, n - 1))) loops, and every loop after that leaves the answer as it is.

Token j is vertex j, and its state is two vectors of n entries, [e_j, what j is known to reach]. In each loop

    attention   j reads the second half of every vertex it knows to reach, so known paths join end to end
    threshold   an average of zeros and ones becomes a zero or a one again
    MLP         adds the hidden edges that leave j

so the length of the paths that are known doubles with every loop. Attention is full, and the threshold stands where a
language model has a norm.

The proof printed in version 4 of the paper does not run: its query and key never meet, a threshold of 0 makes an edge
of every softmax weight, and without the identity in the first state a vertex with no edges has nothing to attend to.
Here the identity is there (a vertex reaches itself), and the threshold is positive. With m >= 1 keys selected, what
can be reached has weight at least 1 / n, and all that cannot at most (n - 1) exp(-beta): with beta = 2 ln(2n) less
than 1 / (4n). The threshold, 1 / (2n), lies between.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from looplm.errors import UserError


def loops_needed(num_vertices: int) -> int:
    """Loops after which every answer is right, whatever the graph: 1 + ceil(log2(max(1, n - 1)))."""
    return 1 + math.ceil(math.log2(max(1, num_vertices - 1)))


class ReachabilityTransformer(nn.Module):
    """One layer, one head, width 2n, frozen, for contexts on the vertices of one hidden graph.

    Args:
        hidden_edges: (n, n), [s, t] where the hidden graph has an edge from s to t.
        beta: sharpness of the attention; None for 2 ln(2n).
        threshold: what counts as reached; None for 1 / (2n).
        identity: whether a vertex knows from the start that it reaches itself.

    The last three are there to be got wrong. Raises UserError for a graph without vertices.
    """

    def __init__(
        self,
        hidden_edges: Bool[Tensor, "n n"],
        *,
        beta: float | None = None,
        threshold: float | None = None,
        identity: bool = True,
    ) -> None:
        super().__init__()
        n = hidden_edges.shape[0]
        if n < 1:
            raise UserError("A graph needs at least one vertex.")
        self.num_vertices, self.identity = n, identity
        self.threshold = 1 / (2 * n) if threshold is None else threshold
        beta = 2 * math.log(2 * n) if beta is None else beta
        nothing, one = torch.zeros(n, n), torch.eye(n)
        self.query = _linear([[nothing, one], [nothing, nothing]])  # what j reaches ...
        self.key = _linear([[beta * one, nothing], [nothing, nothing]])  # ... against who k is
        self.value = _linear([[nothing, nothing], [nothing, one]])  # what k reaches
        self.up = _linear([[nothing, nothing], [hidden_edges.T.float(), nothing]])
        self.down = _linear([[one, nothing], [nothing, one]])

    def encode(self, context_edges: Bool[Tensor, "B n n"]) -> Float[Tensor, "B n 2n"]:
        """The first states: every vertex knows itself and its edges in the context."""
        one = torch.eye(self.num_vertices, dtype=self.query.weight.dtype).expand(len(context_edges), -1, -1)
        known = context_edges | one.bool() if self.identity else context_edges
        return torch.cat([one, known.to(one.dtype)], dim=-1)

    def run_loop(self, state: Float[Tensor, "B n 2n"]) -> Float[Tensor, "B n 2n"]:
        """One application of the layer."""
        scores = self.query(state) @ self.key(state).mT  # (B, n, n), token j over keys k
        state = self._decide(state + scores.softmax(-1) @ self.value(state))
        return self._decide(state + self.down(self.up(state).relu()))

    def forward(self, context_edges: Bool[Tensor, "B n n"], num_loops: int | None = None) -> Bool[Tensor, "B n n"]:
        """[b, s, t]: whether t is found to be reachable from s in the union of context b and the hidden graph.

        num_loops: those of :func:`loops_needed` when None.
        """
        state = self.encode(context_edges)
        for _ in range(loops_needed(self.num_vertices) if num_loops is None else num_loops):
            state = self.run_loop(state)
        return self.readout(state)

    def readout(self, state: Float[Tensor, "B n 2n"]) -> Bool[Tensor, "B n n"]:
        """[b, s, t]: whether s knows that it reaches t."""
        return state[..., self.num_vertices :] > 0.5

    def _decide(self, state: Tensor) -> Tensor:
        return (state > self.threshold).to(state.dtype)


def _linear(blocks: list[list[Tensor]]) -> nn.Linear:
    """A linear map whose weight is made of four blocks."""
    weight = torch.cat([torch.cat(row, dim=1) for row in blocks])
    linear = nn.Linear(*weight.T.shape, bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def reachable(edges: Bool[Tensor, "... n n"]) -> Bool[Tensor, "... n n"]:
    """[s, t]: whether a path, perhaps of no edge at all, leads from s to t (Warshall 1962)."""
    found = edges | torch.eye(edges.shape[-1], dtype=torch.bool)
    for via in range(edges.shape[-1]):
        found = found | (found[..., :, via, None] & found[..., None, via, :])
    return found


@dataclass(frozen=True, kw_only=True)
class ReachabilityCheck:
    """A line of :func:`check_reachability`."""

    what: str
    num_graphs: int
    num_pairs: int
    """(source, target) pairs in all graphs."""
    wrong_graphs: int
    wrong_pairs: int
    must_fail: bool = False
    """Whether it was done wrong on purpose."""


def check_reachability(num_random: int = 1000, max_vertices: int = 64, seed: int = 0) -> tuple[ReachabilityCheck, ...]:
    """The construction against Warshall's algorithm, after exactly the loops it needs, and again after eight more.

    All pairs of a hidden and a context graph of up to 3 vertices; `num_random` random pairs of 2 to `max_vertices`
    vertices, sparse and dense; hidden paths, also one loop too early, where the loops they need show to be needed;
    then, on random graphs of 8 vertices, each of the choices that are known to be wrong.
    Raises UserError for fewer than one random graph or two vertices.
    """
    if num_random < 1 or max_vertices < 2:
        raise UserError(f"{num_random} random graphs of 2 to {max_vertices} vertices cannot be drawn.")
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, max_vertices + 1, (num_random,), generator=generator).tolist()
    to_max = range(2, max_vertices + 1)
    eights = [random_graphs(8, 1, generator) for _ in range(min(num_random, 300))]
    empty = [torch.zeros(1, n, n, dtype=torch.bool) for n in to_max]
    return (
        *(_summary(f"every graph, n = {n}", [_compare(g, all_graphs(n)) for g in all_graphs(n)]) for n in (1, 2, 3)),
        _summary(
            f"random graphs, n = 2 to {max_vertices}", [_compare(*random_graphs(n, 1, generator)) for n in sizes]
        ),
        _summary(
            f"hidden paths, n = 2 to {max_vertices}",
            [_compare(path_graph(n), none) for n, none in zip(to_max, empty, strict=True)],
        ),
        _summary(
            f"hidden paths, n = 2 to {max_vertices}, a loop fewer",
            [_compare(path_graph(n), none, too_early=1) for n, none in zip(to_max, empty, strict=True)],
            must_fail=True,
        ),
        _summary("threshold 0, n = 8", [_compare(*pair, threshold=0.0) for pair in eights], must_fail=True),
        _summary("no identity, n = 8", [_compare(*pair, identity=False) for pair in eights], must_fail=True),
        _summary("beta 1, n = 8", [_compare(*pair, beta=1.0) for pair in eights], must_fail=True),
    )


def all_graphs(num_vertices: int) -> Bool[Tensor, "G n n"]:
    """Every directed graph without edges from a vertex to itself, all 2^(n (n - 1)) of them."""
    places = (~torch.eye(num_vertices, dtype=torch.bool)).nonzero()  # (n (n - 1), 2)
    numbers = torch.arange(2 ** len(places))[:, None]
    graphs = torch.zeros(len(numbers), num_vertices, num_vertices, dtype=torch.bool)
    graphs[:, places[:, 0], places[:, 1]] = (numbers >> torch.arange(len(places))) % 2 == 1
    return graphs


def random_graphs(
    num_vertices: int, num_contexts: int, generator: torch.Generator
) -> tuple[Bool[Tensor, "n n"], Bool[Tensor, "B n n"]]:
    """A hidden graph and contexts for it, together half an edge to two edges a vertex: long paths, mixed answers."""
    mean_degree = 0.5 + 1.5 * torch.rand(num_contexts + 1, 1, 1, generator=generator)
    drawn = torch.rand(num_contexts + 1, num_vertices, num_vertices, generator=generator)
    edges = (drawn < mean_degree / (2 * num_vertices)) & ~torch.eye(num_vertices, dtype=torch.bool)
    return edges[0], edges[1:]


def path_graph(num_vertices: int) -> Bool[Tensor, "n n"]:
    """0 -> 1 -> ... -> n - 1, whose ends are as far apart as can be."""
    return torch.diag(torch.ones(num_vertices - 1), 1).bool()


def _compare(
    hidden: Tensor,
    contexts: Tensor,
    *,
    beta: float | None = None,
    threshold: float | None = None,
    identity: bool = True,
    too_early: int = 0,
) -> Tensor:
    """(2, B): pairs that are wrong after the loops needed, less `too_early`, or eight loops after that; all pairs."""
    model = ReachabilityTransformer(hidden, beta=beta, threshold=threshold, identity=identity)
    state, expected = model.encode(contexts), reachable(hidden | contexts)
    wrong = torch.zeros_like(expected)
    for num_loops in (loops_needed(len(hidden)) - too_early, 0 if too_early else 8):
        for _ in range(num_loops):
            state = model.run_loop(state)
        wrong |= model.readout(state) != expected
    return torch.stack([wrong.sum((1, 2)), torch.full((len(contexts),), len(hidden) ** 2)])


def _summary(what: str, found: list[Tensor], *, must_fail: bool = False) -> ReachabilityCheck:
    wrong, pairs = torch.cat(found, dim=1)
    return ReachabilityCheck(
        what=what,
        num_graphs=len(wrong),
        num_pairs=int(pairs.sum()),
        wrong_graphs=int((wrong > 0).sum()),
        wrong_pairs=int(wrong.sum()),
        must_fail=must_fail,
    )
