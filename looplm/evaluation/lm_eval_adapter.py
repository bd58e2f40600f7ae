"""lm-eval's view of a LoopLM: all depths of a log-likelihood task from one forward, the engine for generation.

`looplm eval` changes `setting` between calls and pays for one forward only, since what every loop says of a
continuation is kept. :mod:`looplm.cli.lm_eval` is lm-eval's own command line with this model type.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from looplm.errors import UserError
from looplm.evaluation.continuation import Continuation, Key
from looplm.evaluation.record import read_head
from looplm.evaluation.setting import Setting
from looplm.hf.load import load, load_tokenizer
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.inference import Engine, FixedDepth, GenerationResult, QuantileExit, SamplingParams
from looplm.inference.exit_policy import hidden_changes, parse_exit
from looplm.inference.prompts import model_defaults
from looplm.model.flops import CacheStrategy, inference_flops

MAX_GEN_TOKENS = 256
"""Where a task does not say."""


@dataclass
class Work:
    """Tokens read out, the loops they were read out at, and FLOPs without attention scores."""

    tokens: int = 0
    loops: int = 0
    prompt_flops: float = 0.0
    """Reading questions; for log-likelihoods, their answers too."""
    decode_flops: float = 0.0
    """Generating, all samples together."""
    cut_prompts: int = 0
    """Prompts too long for the context, which lost their beginning."""

    @property
    def mean_loops(self) -> float | None:
        """None before there is a token."""
        return self.loops / self.tokens if self.tokens else None


@dataclass(frozen=True)
class Batching:
    """Rows of a forward, and what it records."""

    size: int = 8
    max_loops: int | None = None
    """None: what the setting needs."""
    changes: bool = False
    """Whether it records what rules by hidden difference and confidence look at; else only for a setting that needs
    it."""
    kept: dict[tuple[bool, Key], Continuation] = field(default_factory=dict)
    """By gate (whether that of Stage I) and text."""


class LoopLMAdapter(TemplateLM):
    """A LoopLM as lm-eval asks it.

    pretrained: a checkpoint directory or hub name, or a loaded model (then with `tokenizer`).
    num_loops, exit_threshold, exit: when tokens leave, `exit` as in `looplm generate --exit`; the checkpoint's own
    choice when none is given.
    kv_cache: cache strategy of generation.
    max_loops: depth that log-likelihoods are recorded to, for later settings; what the first one needs when None.
    """

    def __init__(
        self,
        pretrained: str | LoopLMForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        num_loops: int | None = None,
        exit_threshold: float | None = None,
        exit: str | None = None,
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
        if sum(one is not None for one in (num_loops, exit_threshold, exit)) > 1:
            raise UserError("num_loops fixes the depth, exit_threshold and exit let tokens choose; give one of them.")
        if isinstance(pretrained, str):
            self.looped, self.tokenizer = load(pretrained, dtype=dtype, device=device), load_tokenizer(pretrained)
        elif tokenizer is None:
            raise UserError("A loaded model needs its tokenizer beside it.")
        else:
            self.looped, self.tokenizer = pretrained, tokenizer
        _, policy = model_defaults(self.looped)
        if num_loops is not None:
            policy = FixedDepth(num_loops)
        elif exit_threshold is not None:
            policy = QuantileExit(exit_threshold)
        elif exit is not None:
            policy = parse_exit(exit, "exit")
        self.setting = Setting(policy, kv_cache)
        self.batching = Batching(int(batch_size), max_loops)
        self.work = Work()
        self.written: list[GenerationResult] = []
        """Answers of the latest call for generation."""
        self.stage_one: nn.Linear | None = None

    def add_stage_one(self, checkpoint: str) -> None:
        """Takes the gate of `checkpoint` for settings that ask for it.

        Raises UserError unless everything but the gate is the same in both: only then is it the gate that differs.
        """
        other = load(checkpoint, dtype=str(self.looped.dtype).removeprefix("torch."), device=self.looped.device)
        mine, theirs = self.looped.state_dict(), other.state_dict()
        gate = ("model.early_exit_gate.weight", "model.early_exit_gate.bias")
        if mine.keys() != theirs.keys() or any(
            name not in gate and not torch.equal(mine[name], theirs[name]) for name in mine
        ):
            raise UserError(
                f"{checkpoint} is another language model, so that scores would not compare gates. Give the checkpoint "
                "that `looplm gate` (or the recipe's stage of gate_loss) started from."
            )
        self.stage_one = other.model.early_exit_gate

    @contextmanager
    def _gate_of_setting(self) -> Iterator[None]:
        """Puts the gate that the setting asks for into the model's place."""
        if not self.setting.stage_one:
            yield
            return
        if self.stage_one is None:
            raise UserError("No checkpoint of Stage I was given whose gate could be used (--stage-one CHECKPOINT).")
        model = self.looped.model
        own, model.early_exit_gate = model.early_exit_gate, self.stage_one
        try:
            yield
        finally:
            model.early_exit_gate = own

    def _flops(self, positions: int, token_loops: int, heads: int) -> float:
        """Of positions that pass `token_loops` loops all together and have the LM head read so often."""
        if not positions:
            return 0.0
        return positions * inference_flops(self.looped.model.config, token_loops / positions, heads / positions)

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
        with self._gate_of_setting():
            self._record(keys, disable_tqdm)
        exit, found = self.setting.exit, []
        depth = exit.max_loops(self.trained_loops)
        for key in keys:
            kept = self.batching.kept[self.setting.stage_one, key]
            likelihood, greedy, loops = kept.at(exit, self.trained_loops)
            positions = min(len(key[0]) + len(key[1]) - 1, self.max_length)
            heads = int(loops.sum()) if exit.needs == "logits" else len(loops)
            self.work.tokens += len(loops)
            self.work.loops += int(loops.sum())
            self.work.prompt_flops += self._flops(positions, positions * depth, heads)
            found.append((likelihood, greedy))
        return found

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context and of what follows it, as log-likelihoods are asked of them."""
        if context:
            start, rest = self._encode_pair(context, continuation)
            return start, rest
        rest = self.tok_encode(continuation)
        alike = rest[0] == self.prefix_token_id
        return (rest[:1], rest[1:]) if alike else ([self.prefix_token_id], rest)

    def record_texts(self, keys: Sequence[Key]) -> list[Continuation]:
        """What every loop says of continuations, those scored before taken from memory; nothing is counted."""
        with self._gate_of_setting():
            self._record(keys, quiet=True)
        return [self.batching.kept[self.setting.stage_one, key] for key in keys]

    def _record(self, keys: Sequence[Key], quiet: bool) -> None:
        exit, kept = self.setting.exit, self.batching.kept
        depth = max(exit.max_loops(self.trained_loops), self.batching.max_loops or 1)
        changes = self.batching.changes or exit.needs in ("state", "logits")

        def lacks(key: Key) -> bool:
            held = kept.get((self.setting.stage_one, key))
            return held is None or len(held.logprobs) < depth or (changes and held.hidden_change is None)

        missing = [key for key in dict.fromkeys(keys) if lacks(key)]
        missing.sort(key=lambda key: -len(key[0]) - len(key[1]))
        starts = range(0, len(missing), self.batching.size)
        for first in tqdm(starts, disable=quiet or not missing, desc="log-likelihoods, all depths"):
            batch = missing[first : first + self.batching.size]
            for key, one in zip(batch, self._continuations(batch, depth, changes), strict=True):
                kept[self.setting.stage_one, key] = one

    @torch.inference_mode()
    def _continuations(self, batch: Sequence[Key], depth: int, changes: bool) -> list[Continuation]:
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
        hidden = [state[predicting] for state in output.loop_hidden_states]
        read = read_head(self.looped.lm_head, hidden, wanted, changes)
        parts: list[Tensor] = [
            -read["cross_entropy"], read["predictions"], wanted, output.gate_logits[:, predicting].float(),
        ]  # fmt: skip
        if changes:
            parts += [hidden_changes(torch.stack(hidden)), read["prediction_kl"]]
        split = [part.cpu().split(lengths, dim=-1) for part in parts]
        # Clones: a split keeps the whole batch alive.
        rows = [[part.clone() for part in one] for one in zip(*split, strict=True)]
        return [Continuation(*row, *([] if changes else [None, None])) for row in rows]

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
        asked: list[tuple[str, dict[str, Any]]] = [request.args for request in requests]  # pyright: ignore[reportAssignmentType]
        sampling = [self._sampling(arguments) for _, arguments in asked]
        texts = [self.tok_encode(text) or [self.prefix_token_id] for text, _ in asked]
        prompts = [ids[-(self.max_length - params.max_tokens) :] for ids, params in zip(texts, sampling, strict=True)]
        self.work.cut_prompts += sum(len(cut) < len(ids) for cut, ids in zip(prompts, texts, strict=True))
        exit = self.setting.exit
        depth = exit.max_loops(self.trained_loops)
        with self._gate_of_setting():
            engine = Engine(self.looped, self.tokenizer, kv_cache=self.setting.kv_cache)
            self.written = list(engine.generate(prompts, sampling, exit))
        for result in self.written:
            if result.finish_reason == "error":
                raise UserError(f"A prompt could not be continued: {result.error}")
            read, later = len(result.prompt_token_ids), result.loops[1:]
            self.work.tokens += len(result.loops)
            self.work.loops += sum(result.loops)
            self.work.prompt_flops += self._flops(read, read * depth, 1)
            heads = sum(later) if exit.needs == "logits" else len(later)
            self.work.decode_flops += self._flops(len(later), sum(result.token_loops[1:]), heads)
        return [result.text or "" for result in self.written]

    def _sampling(self, arguments: dict[str, Any]) -> SamplingParams:
        """What a task asks for, as long as the setting allows. Raises UserError when no context is left to ask in."""
        params = sampling_of(arguments)
        if self.setting.max_gen_toks is not None:
            params = replace(params, max_tokens=self.setting.max_gen_toks)
        if params.max_tokens >= self.max_length:
            raise UserError(
                f"The task lets answers run to {params.max_tokens:,} tokens, and the context of the model is "
                f"{self.max_length:,}: nothing would be left for the question. Give --max-gen-toks, far below it."
            )
        return params


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
