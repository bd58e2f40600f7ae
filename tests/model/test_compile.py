"""Compiled layer by layer, a model of any depth is one graph: depth stays data of the loop outside."""

import subprocess
import sys

# In a process of its own, since the compiler does not trace through the shape checks that pytest switches on.
SCRIPT = """
import torch
from looplm.model.config import LoopedConfig
from looplm.model.looped import LoopedTransformer

for options in ({}, {"lora_rank": 2, "injection": "scalar"}):
    config = LoopedConfig(
        vocab_size=31, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, num_loops=3, **options
    )
    model, ids, graphs = LoopedTransformer(config), torch.randint(31, (2, 5)), []
    expected = model(ids, num_loops=5).gate_logits

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for layer in model.layers:
        layer.compile(backend=keep, fullgraph=True)
    torch.testing.assert_close(model(ids, num_loops=5).gate_logits, expected)
    print(len(graphs))
"""


def test_one_graph_for_all_loops_and_layers():
    """A loop index in the graph, or LoRA slices picked inside it, would compile once more for every loop."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1"]
