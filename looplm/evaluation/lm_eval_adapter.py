"""lm-eval's view of a LoopLM: all depths of a log-likelihood task from one forward, the engine for generation.

`looplm eval` changes `setting` between calls and pays for one forward only, since what every loop says of a
continuation is kept. :mod:`looplm.cli.lm_eval` is lm-eval's own command line with this model type.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from looplm.errors import UserError
from looplm.evaluation.record import read_head
from looplm.hf.load import load, load_tokenizer
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.inference import Engine, ExitPolicy, FixedDepth, QuantileExit, SamplingParams
from looplm.inference.exit_policy import exit_loops
from looplm.model.flops import CacheStrategy

MAX_GEN_TOKENS = 256
"""Where a task does not say."""


@dataclass(frozen=True)
class Setting:
    """How deep tokens go, and what the cache keeps while generating."""

    exit: ExitPolicy
    kv_cache: CacheStrategy = "per_loop"

    @property
    def name(self) -> str:
        """For tables and files."""
        depth = f"loops {self.exit.num_loops}" if isinstance(self.exit, FixedDepth) else ""
        gate = f"threshold {self.exit.threshold:g}" if isinstance(self.exit, QuantileExit) else ""
        return " ".join((depth or gate or repr(self.exit), *([] if self.kv_cache == "per_loop" else [self.kv_cache])))


@dataclass(frozen=True)
class Continuation:
    """What every loop says of the n tokens of one continuation."""

    logprobs: Float[Tensor, "R n"]
    greedy: Bool[Tensor, "R n"]
    """Whether the token is the likeliest."""
    gate_logits: Float[Tensor, "R n"]
    """At the positions that predict them."""

    def at(self, exit: ExitPolicy, trained_loops: int) -> tuple[float, bool, Int[Tensor, " n"]]:
        """Its log-likelihood, whether greedy decoding would write it, and the loop of each token, under a policy.

        Raises UserError for a policy that looks at more than the gate.
        """
        if exit.needs not in ("nothing", "gate"):
            raise UserError(f"{exit!r} is not available for log-likelihoods; use a fixed depth or a threshold.")
        loops = exit_loops(exit, self.gate_logits[: exit.max_loops(trained_loops)], trained_loops)
        index = loops[None] - 1
        chosen = self.logprobs.double().gather(0, index).sum().item()
        return chosen, bool(self.greedy.gather(0, index).all()), loops


@dataclass
class DepthCount:
    """Tokens read out, and the loops they were read out at."""

    tokens: int = 0
    loops: int = 0

    def add(self, loops: Sequence[int]) -> None:
        self.tokens += len(loops)
        self.loops += sum(loops)

    @property
    def mean(self) -> float | None:
        return self.loops / self.tokens if self.tokens else None


@dataclass(frozen=True)
class Batching:
    """Rows of a forward, and the depth that it records."""

    size: int = 8
    max_loops: int | None = None
    """None: what the setting needs."""
    kept: dict[tuple[tuple[int, ...], tuple[int, ...]], Continuation] = field(default_factory=dict)


class LoopLMAdapter(TemplateLM):
    """A LoopLM as lm-eval asks it.

    pretrained: a checkpoint directory or hub name, or a loaded model (then with `tokenizer`).
    num_loops, exit_threshold: how deep tokens go; the checkpoint's own choice when neither is given.
    kv_cache: cache strategy of generation.
    max_loops: depth that log-likelihoods are recorded to, for later settings; what the first one needs when None.
    """

    def __init__(
        self,
        pretrained: str | LoopLMForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        num_loops: int | None = None,
        exit_threshold: float | None = None,
        kv_cache: CacheStrategy = "per_loop",
        batch_size: int | str = 8,
        max_loops: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        unknown.pop("max_batch_size", None)  # lm-eval's command line always sends it
        if unknown:
            raise UserError(f"The looplm adapter has no argument {', '.join(sorted(unknown))}.")
        if num_loops is not None and exit_threshold is not None:
            raise UserError("num_loops fixes the depth and exit_threshold lets tokens choose; give one of them.")
        if isinstance(pretrained, str):
            self.looped, self.tokenizer = load(pretrained, dtype=dtype, device=device), load_tokenizer(pretrained)
        elif tokenizer is None:
            raise UserError("A loaded model needs its tokenizer beside it.")
        else:
            self.looped, self.tokenizer = pretrained, tokenizer
        saved = self.looped.config.exit_threshold
        threshold = (1.0 if saved is None else saved) if exit_threshold is None else exit_threshold
        exit = FixedDepth(num_loops) if num_loops is not None else QuantileExit(threshold)
        self.setting = Setting(exit, kv_cache)
        self.batching = Batching(int(batch_size), max_loops)
        self.depths = DepthCount()

    # --- What lm-eval asks of a template ----------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self._special(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text without context."""
        return self._special(self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)

    @property
    def max_length(self) -> int:
        """Tokens of the context."""
        return self.looped.model.config.max_position_embeddings

    @property
    def trained_loops(self) -> int:
        return self.looped.model.config.num_loops

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The checkpoint's own, where it is asked for."""
        return self.tokenizer.chat_template if chat_template else None  # pyright: ignore[reportReturnType]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Turns as one text."""
        return self.tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Plain tokens: no special ones around the text."""
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def _special(self, *candidates: Any) -> int:
        for token in candidates:
            if isinstance(token, int):
                return token
        raise UserError("The tokenizer has neither a bos nor an eos token to begin a text with.")

    # --- Log-likelihoods --------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Of each continuation after its context, at the current setting; recorded at most once for all settings."""
        keys = [(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        self._record(keys, disable_tqdm)
        found = []
        for key in keys:
            likelihood, greedy, loops = self.batching.kept[key].at(self.setting.exit, self.trained_loops)
            self.depths.add(loops.tolist())
            found.append((likelihood, greedy))
        return found

    def _record(self, keys: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], quiet: bool) -> None:
        depth = max(self.setting.exit.max_loops(self.trained_loops), self.batching.max_loops or 1)
        kept = self.batching.kept
        missing = [key for key in dict.fromkeys(keys) if key not in kept or len(kept[key].logprobs) < depth]
        missing.sort(key=lambda key: -len(key[0]) - len(key[1]))
        starts = range(0, len(missing), self.batching.size)
        for first in tqdm(starts, disable=quiet or not missing, desc="log-likelihoods, all depths"):
            batch = missing[first : first + self.batching.size]
            kept.update(zip(batch, self._continuations(batch, depth), strict=True))

    @torch.inference_mode()
    def _continuations(
        self, batch: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], depth: int
    ) -> list[Continuation]:
        """One forward over contexts and continuations, padded on the right; too long ones lose their beginning."""
        device = self.looped.lm_head.weight.device
        rows = [[*context, *continuation][-(self.max_length + 1) :] for context, continuation in batch]
        longest = max(len(row) for row in rows) - 1
        inputs = torch.tensor([row[:-1] + [0] * (longest + 1 - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * (len(row) - 1) + [0] * (longest + 1 - len(row)) for row in rows], device=device)
        output = self.looped.model(inputs, None if mask.all() else mask, num_loops=depth)
        predicting = torch.zeros_like(mask, dtype=torch.bool)
        lengths, targets = [], []
        for i, (row, (_, continuation)) in enumerate(zip(rows, batch, strict=True)):
            n = min(len(continuation), len(row) - 1)
            predicting[i, len(row) - 1 - n : len(row) - 1] = True
            lengths.append(n)
            targets += row[len(row) - n :]
        wanted = torch.tensor(targets, device=device)
        read = read_head(self.looped.lm_head, [state[predicting] for state in output.loop_hidden_states], wanted)
        parts = (
            (-read["cross_entropy"]).cpu().split(lengths, dim=1),
            (read["predictions"] == wanted).cpu().split(lengths, dim=1),
            output.gate_logits[:, predicting].float().cpu().split(lengths, dim=1),
        )
        # Clones: a split keeps the whole batch alive.
        return [Continuation(*(part.clone() for part in one)) for one in zip(*parts, strict=True)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of the context that predict every token once."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length,
                    context_len=1,
                )
            ]  # fmt: skip
            scored = self._loglikelihood_tokens(
                [(None, context, continuation) for context, continuation in windows], disable_tqdm
            )
            found.append(sum(likelihood for likelihood, _ in scored))
        return found

    # --- Generation -------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations by the engine, all requests in one batch, under the current setting."""
        engine = Engine(self.looped, self.tokenizer, kv_cache=self.setting.kv_cache)
        asked: list[tuple[str, dict[str, Any]]] = [request.args for request in requests]  # pyright: ignore[reportAssignmentType]
        sampling = [sampling_of(arguments) for _, arguments in asked]
        prompts = [
            self.tok_encode(text)[-(self.max_length - params.max_tokens) :] or [self.prefix_token_id]
            for (text, _), params in zip(asked, sampling, strict=True)
        ]
        results = list(engine.generate(prompts, sampling, self.setting.exit))
        for result in results:
            if result.finish_reason == "error":
                raise UserError(f"A prompt could not be continued: {result.error}")
            self.depths.add(result.loops)
        return [result.text or "" for result in results]


def sampling_of(arguments: dict[str, Any]) -> SamplingParams:
    """lm-eval's generation arguments. Raises UserError for one that the engine has not."""
    given = dict(arguments)
    until = given.pop("until", [])
    length = next(
        (given.pop(name) for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if name in given), None
    )
    params = SamplingParams(
        max_tokens=MAX_GEN_TOKENS if length is None else int(length),
        stop=[until] if isinstance(until, str) else list(until),
    )
    sampled = given.pop("do_sample", None)
    if sampled is False:  # greedy, whatever temperature is named
        given.pop("temperature", None)
    known = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"}
    if unknown := sorted(given.keys() - known):
        raise UserError(f"The task asks for generation with {', '.join(unknown)}, which the engine does not have.")
    if sampled:
        given.setdefault("temperature", 1.0)
    return replace(params, **given)
