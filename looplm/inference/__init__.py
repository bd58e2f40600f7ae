"""Generation in which an early exit really skips work: any batch, rows at different loops in one pass.

Two counts stand beside the claimed depth (the loops whose states were read out): weight passes, applications of the
core's weights however many rows they carry, and token-loops, rows times loops really computed. Shapes add to the
legend of `looplm.model`: N positions or requests taken together, M positions that a row may read.

Reading order: `exit_policy` (when a token leaves) -> `sampling` (which token comes next) -> `text` (stop ids, pieces
of text) -> `blocks`, `kv_cache`, `memory` (what is kept where) -> `request` -> `layout` (runs of positions as a
rectangle) -> `passes` (the model on them) -> `decide` (who leaves) and `choice` (with which token), with
`speculative` and `screening` -> `prefill` and `decode` (the two steps) -> `scheduler`, `capacity`, `prompts`, `intake`
(from what is asked for to requests), `results` -> `engine`. `packed`, `native`, `native_block` and `graphs` run the
same passes in other ways; `reference` is the slow oracle that all of it is tested against.
"""

from looplm.inference.engine import Engine
from looplm.inference.exit_policy import (
    ConfidenceExit,
    Deadline,
    ExitPolicy,
    FixedDepth,
    HiddenDiffExit,
    QuantileExit,
)
from looplm.inference.prompts import Parts
from looplm.inference.results import EngineStats, GenerationResult, Piece
from looplm.inference.sampling import SamplingParams
from looplm.inference.screening import Mask, Preview, Redirect, Screen, Stop
from looplm.inference.speculative import Speculation

__all__ = [
    "ConfidenceExit",
    "Deadline",
    "Engine",
    "EngineStats",
    "ExitPolicy",
    "FixedDepth",
    "GenerationResult",
    "HiddenDiffExit",
    "Mask",
    "Parts",
    "Piece",
    "Preview",
    "QuantileExit",
    "Redirect",
    "SamplingParams",
    "Screen",
    "Speculation",
    "Stop",
]
