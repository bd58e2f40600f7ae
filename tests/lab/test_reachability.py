"""The theorem's transformer against a depth-first search, and against the ways in which it is known to fail."""

import math

import pytest
import torch

from looplm.errors import UserError
from looplm.lab.reachability import (
    ReachabilityTransformer,
    all_graphs,
    check_reachability,
    loops_needed,
    path_graph,
    random_graphs,
    reachable,
)


def search(edges: torch.Tensor) -> torch.Tensor:
    """Depth-first from every vertex, on sets."""
    n = len(edges)
    after = {s: {t for t in range(n) if edges[s, t]} for s in range(n)}
    found = torch.zeros(n, n, dtype=torch.bool)
    for source in range(n):
        pending, seen = [source], {source}
        while pending:
            new = after[pending.pop()] - seen
            seen |= new
            pending += new
        found[source, list(seen)] = True
    return found


def no_edges(n: int) -> torch.Tensor:
    return torch.zeros(1, n, n, dtype=torch.bool)


def test_warshall_agrees_with_the_search():
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 5, 12):
        hidden, contexts = random_graphs(n, 20, generator)
        for edges in hidden | contexts:
            assert torch.equal(reachable(edges), search(edges))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_graph_of_up_to_three_vertices(n):
    graphs = all_graphs(n)
    assert len(graphs) == 2 ** (n * (n - 1)) and not graphs.diagonal(dim1=1, dim2=2).any()
    assert len({tuple(graph.flatten().tolist()) for graph in graphs}) == len(graphs)
    answers = {tuple(graph.flatten().tolist()): search(graph) for graph in graphs}
    for hidden in graphs:
        expected = torch.stack([answers[tuple((hidden | graph).flatten().tolist())] for graph in graphs])
        assert torch.equal(ReachabilityTransformer(hidden)(graphs), expected)


def test_a_few_large_graphs_and_loops_beyond_the_needed_ones():
    generator = torch.Generator().manual_seed(1)
    mixed = 0
    for n in (2, 9, 33, 64):
        hidden, contexts = random_graphs(n, 2, generator)
        model = ReachabilityTransformer(hidden)
        for num_loops in (None, loops_needed(n) + 1, 20):
            for context, answer in zip(contexts, model(contexts, num_loops), strict=True):
                expected = search(hidden | context)
                assert torch.equal(answer, expected)
                mixed += 0.02 < expected.double().mean() < 0.98
    assert mixed >= 12  # the graphs are neither without paths nor all connected


def test_the_bound_is_tight_on_hidden_paths_and_one_loop_loose_on_a_path_in_the_context():
    for n in range(2, 65):
        path, bound = path_graph(n), 1 + math.ceil(math.log2(max(1, n - 1)))
        assert loops_needed(n) == bound
        expected = torch.ones(n, n).triu().bool()
        hidden, given = ReachabilityTransformer(path), ReachabilityTransformer(no_edges(n)[0])
        assert torch.equal(hidden(no_edges(n), bound)[0], expected)
        assert not torch.equal(hidden(no_edges(n), bound - 1)[0], expected)
        assert torch.equal(given(path[None], bound - 1)[0], expected)
        if bound > 1:
            assert not torch.equal(given(path[None], max(0, bound - 2))[0], expected) or n == 2


def test_the_state_is_what_the_docstring_says():
    model = ReachabilityTransformer(path_graph(4))
    state = model.encode(no_edges(4))
    assert torch.equal(state[0], torch.cat([torch.eye(4), torch.eye(4)], dim=1))
    one = model.run_loop(state)
    assert torch.equal(one[0, :, :4], torch.eye(4))
    assert torch.equal(one[0, :, 4:], torch.eye(4) + path_graph(4))  # paths of one edge after one loop
    assert torch.equal(model.readout(model.run_loop(one))[0], torch.ones(4, 4).triu().tril(2).bool())  # of two
    assert all(not parameter.requires_grad for parameter in model.parameters())


def wrong_pairs(edit, **arguments) -> tuple[int, int]:
    """Wrong pairs of two different vertices in 40 random graphs of 8, with the mistake and without."""
    generator = torch.Generator().manual_seed(2)
    counts = [0, 0]
    for _ in range(40):
        hidden, contexts = random_graphs(8, 1, generator)
        expected = search(hidden | contexts[0])
        wrong = ReachabilityTransformer(hidden, **arguments)
        edit(wrong)
        for i, model in enumerate((wrong, ReachabilityTransformer(hidden))):
            counts[i] += int(((model(contexts)[0] != expected) & ~torch.eye(8, dtype=torch.bool)).sum())
    return counts[0], counts[1]


def printed_query(model: ReachabilityTransformer) -> None:
    """[[0, 0], [0, I]], as version 4 prints it, against a key that only fills the first half."""
    model.query.weight.zero_()
    model.query.weight[8:, 8:] = torch.eye(8)


@pytest.mark.parametrize(
    ("edit", "arguments"),
    [
        (lambda model: None, {"threshold": 0.0}),
        (lambda model: None, {"identity": False}),
        (lambda model: None, {"beta": 1.0}),
        (printed_query, {}),
    ],
    ids=["threshold 0", "no identity", "beta 1", "printed query"],
)
def test_the_known_mistakes_fail_where_the_construction_does_not(edit, arguments):
    wrong, right = wrong_pairs(edit, **arguments)
    assert wrong > 200 and right == 0


def test_the_check_tells_right_from_wrong():
    checks = check_reachability(num_random=12, max_vertices=16)
    assert sum(check.num_graphs for check in checks if "every" in check.what) == 1 + 16 + 4096
    for check in checks:
        assert (check.wrong_graphs > 0) == (check.wrong_pairs > 0) == check.must_fail, check
    (early,) = [check for check in checks if "fewer" in check.what]
    assert early.wrong_graphs == early.num_graphs == 15
    with pytest.raises(UserError):
        check_reachability(num_random=0)
    with pytest.raises(UserError):
        check_reachability(max_vertices=1)
    with pytest.raises(UserError):
        ReachabilityTransformer(torch.zeros(0, 0, dtype=torch.bool))
