"""What a looped model is trained for: pure functions of a forward's output, the head weight and the labels.

    loss, metrics = expected_loss(model, model(input_ids), labels, beta=0.05)   # Stage I: model and gate together
    loss, metrics = last_loop_loss(model, model(input_ids), labels)             # the deepest loop alone, no gate
    loss, metrics = gate_loss(model, model(input_ids), labels)                  # Stage II: the gate alone
    loss, metrics = routing_loss(model, model(input_ids), labels)               # each token at its first right loop

`cross_entropy` holds the chunked head that both read their token losses from: no tensor of S * V * R exists.
"""

from looplm.objectives.cross_entropy import shift_labels, weighted_cross_entropy
from looplm.objectives.expected_loss import expected_loss
from looplm.objectives.gate_loss import gate_loss
from looplm.objectives.last_loop import last_loop_loss
from looplm.objectives.prior import geometric_prior, uniform_prior
from looplm.objectives.routing import routing_loss

__all__ = [
    "expected_loss",
    "gate_loss",
    "geometric_prior",
    "last_loop_loss",
    "routing_loss",
    "shift_labels",
    "uniform_prior",
    "weighted_cross_entropy",
]
