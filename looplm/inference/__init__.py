"""Generation in which an early exit really skips work: any batch, rows at different loops in one pass.

Two counts stand beside the claimed depth (the loops whose states were read out): weight passes, applications of the
core's weights however many rows they carry, and token-loops, rows times loops really computed. Shapes add to the
legend of `looplm.model`: N requests that leave in a tick, P positions a slot has room for.

Reading order: `exit_policy` (when a token leaves) -> `sampling` (which token comes next) -> `text` (stop ids, pieces
of text) -> `kv_cache` (keys per loop, rows at different loops) -> `scheduler` (requests and slots) -> `layout`
(segments of positions as a rectangle) -> `runner` (prefill and tick) -> `engine`; `reference` is the slow oracle
that all of it is tested against.
"""

from looplm.inference.engine import Engine, EngineStats, GenerationResult
from looplm.inference.exit_policy import ExitPolicy, FixedDepth, QuantileExit
from looplm.inference.sampling import SamplingParams

__all__ = [
    "Engine",
    "EngineStats",
    "ExitPolicy",
    "FixedDepth",
    "GenerationResult",
    "QuantileExit",
    "SamplingParams",
]
