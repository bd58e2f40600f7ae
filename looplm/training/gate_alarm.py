"""Says when the exit gate has collapsed: the training loss does not show it, the exit distribution does."""

import math

COLLAPSED_SHARE = 0.02
"""Entropy of the mean exit pdf below this share of ln R counts as collapsed."""


def gate_alarm(exit_pdf: list[float], beta: float | None) -> str | None:
    """A warning with the measured mean exit pdf and what to change, or None while more than one loop is in use.

    A gate that lies on one loop gets almost no gradient and rarely recovers; warmup prevents it and a larger
    beta heals it (Closing the Loop 3.3). `beta` is the entropy weight in force, None where there is none.
    """
    if len(exit_pdf) < 2:
        return None
    entropy = -sum(p * math.log(p) for p in exit_pdf if p > 0)
    if entropy >= COLLAPSED_SHARE * math.log(len(exit_pdf)):
        return None
    loop = max(range(len(exit_pdf)), key=exit_pdf.__getitem__) + 1
    shares = ", ".join(f"{p:.3f}" for p in exit_pdf)
    remedy = "a longer warmup or a lower learning rate" + (f", or a beta above {beta:g}" if beta is not None else "")
    return f"The exit gate has collapsed onto loop {loop}: mean exit pdf {shares}. Try {remedy}."
