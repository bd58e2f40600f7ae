"""What the analyses share: the model, what it is asked, and the answers of every loop."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from looplm.analysis.prompts import AskedPrompt
    from looplm.analysis.readout import Labels
    from looplm.analysis.trace import Trace
    from looplm.hf.modeling import LoopLMForCausalLM

NAMED_ANSWERS = 10
"""Free answers that get a name of their own; the rest are "other"."""

Checkpoint = Annotated[str, typer.Argument(help="A directory or hub name.", show_default=False)]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        help="JSONL of prompt or input_ids, with answer and score where known; or a text file, a prompt a line."
    ),
]
PairFile = Annotated[
    Path | None, typer.Option(help="TSV, CSV or JSONL of question1, question2, is_duplicate; asked for yes or no.")
]
Generator = Annotated[
    str | None, typer.Option(help="A task's documents instead, as looplm.lab.mano:documents.", show_default=False)
]
Arguments = Annotated[str, typer.Option(help="The generator's arguments, as JSON.")]
Count = Annotated[int, typer.Option(help="Prompts to take, at most.", min=1)]
LabelNames = Annotated[
    str | None,
    typer.Option(help="Answers to choose between, with commas; any token if left out (pairs: yes,no)."),
]
Chat = Annotated[bool, typer.Option("--chat", help="Ask through the checkpoint's chat template.")]
NumLoops = Annotated[int | None, typer.Option(help="Depth; as trained if left out.", min=1, show_default=False)]
Out = Annotated[Path, typer.Option(help="Directory for the page and the numbers.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default=False)]
Dtype = Annotated[str | None, typer.Option(help="fp32, bf16 ...; the checkpoint's own if left out.")]
Seed = Annotated[int, typer.Option(help="Of every draw.", min=0)]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where prompts come from."""

    prompts: Path | None
    pairs: Path | None = None
    generator: str | None = None
    arguments: str = "{}"
    count: int = 1000
    labels: str | None = None
    chat: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Asked:
    """A model and its prompts."""

    model: "LoopLMForCausalLM"
    tokenizer: "PreTrainedTokenizerBase | None"
    prompts: "list[AskedPrompt]"
    labels: "Labels | None"
    """None: free answers."""

    @property
    def token_ids(self) -> list[list[int]]:
        return [list(prompt.token_ids) for prompt in self.prompts]


@dataclass(frozen=True)
class Answers:
    """Of every loop to every prompt, as numbers, with what these stand for."""

    numbers: "Tensor"
    """(R, N)."""
    names: tuple[str, ...]
    right: "Tensor | None"
    """(N,), where known."""


def ask(checkpoint: str, source: Source, device: str | None, dtype: str | None) -> Asked:
    """Loads the model and reads its prompts. Raises UserError for anything that is wrong with either."""
    from looplm.analysis.prompts import PAIR_LABELS, generated_prompts, read_pairs, read_prompts
    from looplm.analysis.readout import spelled_labels
    from looplm.hf.load import load

    if sum(one is not None for one in (source.prompts, source.pairs, source.generator)) != 1:
        raise UserError("Give the prompts by one of --prompts, --pairs and --generator.")
    model = load(checkpoint, dtype=dtype, device=device)
    tokenizer = tokenizer_of(checkpoint)
    encode = None if tokenizer is None else encoder(tokenizer, source.chat)
    if source.pairs is not None:
        if encode is None:
            raise UserError(f"{checkpoint} has no tokenizer, and pairs of questions are text.")
        prompts = read_pairs(source.pairs, encode, count=source.count, seed=source.seed)
    elif source.generator is not None:
        prompts = generated_prompts(source.generator, parse_arguments(source.arguments), source.count)
    else:
        assert source.prompts is not None
        prompts = read_prompts(source.prompts, encode)[: source.count]
    names = source.labels.split(",") if source.labels else list(PAIR_LABELS) if source.pairs is not None else None
    if names is not None and tokenizer is None:
        raise UserError(f"{checkpoint} has no tokenizer to find the labels' tokens with; leave --labels out.")
    labels = (
        None if names is None or tokenizer is None else spelled_labels(tokenizer, [name.strip() for name in names])
    )
    check_prompts(model, prompts)
    return Asked(model, tokenizer, prompts, labels)


def check_prompts(model: "LoopLMForCausalLM", prompts: "Sequence[AskedPrompt]") -> None:
    """Raises UserError for tokens outside the vocabulary, and prompts beyond the context."""
    config = model.model.config
    for number, prompt in enumerate(prompts, start=1):
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < config.vocab_size:
            raise UserError(f"Prompt {number} has a token outside the vocabulary of {config.vocab_size}.")
        if len(prompt.token_ids) > config.max_position_embeddings:
            raise UserError(
                f"Prompt {number} has {len(prompt.token_ids)} tokens, more than the context of "
                f"{config.max_position_embeddings}."
            )


def tokenizer_of(checkpoint: str) -> "PreTrainedTokenizerBase | None":
    """The checkpoint's tokenizer; None where it has none."""
    from looplm.hf.checkpoint import find_checkpoint
    from looplm.hf.load import TOKENIZER_FILES, load_tokenizer

    directory = find_checkpoint(checkpoint)
    return load_tokenizer(checkpoint) if any((directory / name).is_file() for name in TOKENIZER_FILES) else None


def encoder(tokenizer: "PreTrainedTokenizerBase", chat: bool) -> Any:
    """Text to token ids; through the chat template, up to where the answer begins, with `chat`."""
    if not chat:
        return tokenizer.encode
    if tokenizer.chat_template is None:
        raise UserError("The checkpoint's tokenizer has no chat template; leave out --chat.")

    def encode(text: str) -> list[int]:
        turns = [{"role": "user", "content": text}]
        rendered = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        return tokenizer.encode(rendered, add_special_tokens=False)

    return encode


def parse_arguments(text: str) -> dict[str, Any]:
    """A JSON object. Raises UserError for anything else."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"--arguments is {text!r}, which is not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise UserError(f'--arguments is {text!r}; it must be a JSON object, as {{"seed": 1}}.')
    return found


def read_answers(asked: Asked, trace: "Trace") -> Answers:
    """What every loop answers, and what would be right."""
    import torch

    from looplm.analysis.prompts import answers_given
    from looplm.analysis.readout import free_answers, label_logits, ranked

    given = answers_given(asked.prompts)
    if asked.labels is not None:
        numbers = label_logits(asked.model.lm_head, trace.hidden, asked.labels).argmax(-1)
        right = None if given is None else torch.tensor([label_number(one, asked.labels.names) for one in given])
        return Answers(numbers, asked.labels.names, right)
    free = free_answers(asked.model.lm_head, trace.hidden)
    known = None if given is None else torch.tensor([answer_token(one, asked.tokenizer) for one in given])
    together, ids = ranked(free if known is None else torch.cat((free, known[None])), NAMED_ANSWERS)
    names = tuple(token_names(ids, asked.tokenizer).values())
    return Answers(together[: len(free)], names, None if known is None else together[-1])


def label_number(answer: str | int, names: tuple[str, ...]) -> int:
    """Which label a right answer is. Raises UserError where it is none."""
    lowered = [name.lower() for name in names]
    if str(answer).strip().lower() not in lowered:
        raise UserError(f"A prompt's answer is {answer!r}, which is none of the labels {', '.join(names)}.")
    return lowered.index(str(answer).strip().lower())


def answer_token(answer: str | int, tokenizer: "PreTrainedTokenizerBase | None") -> int:
    """The token that begins a right answer."""
    if isinstance(answer, int):
        return answer
    if tokenizer is None:
        raise UserError(f"A prompt's answer is the text {answer!r}, and the checkpoint has no tokenizer.")
    ids = tokenizer.encode(answer, add_special_tokens=False)
    if not ids:
        raise UserError("A prompt's answer is empty.")
    return ids[0]


def token_names(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase | None") -> dict[int, str]:
    """Texts of tokens by their ids; the ids themselves without a tokenizer."""
    if tokenizer is None:
        return {token: str(token) for token in ids}
    return {token: str(tokenizer.decode([token])) for token in ids}
