"""What the analyses share: the model, what it is asked, and the answers of every loop."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from looplm.cli.analyze_options import Source, Subject
from looplm.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from looplm.analysis.prompts import AskedPrompt
    from looplm.analysis.readout import Labels
    from looplm.analysis.trace import Trace
    from looplm.hf.modeling import LoopLMForCausalLM
    from looplm.model.language_model import LoopLM

NAMED_ANSWERS = 10
"""Free answers that get a name of their own; the rest are "other"."""


@dataclass(frozen=True)
class Asked:
    """A model and its prompts."""

    model: "LoopLMForCausalLM"
    view: "LoopLM"
    """What is looked into: the model itself, or its layers taken for loops."""
    tokenizer: "PreTrainedTokenizerBase | None"
    prompts: "list[AskedPrompt]"
    labels: "Labels | None"
    """None: free answers."""

    @property
    def token_ids(self) -> list[list[int]]:
        return [list(prompt.token_ids) for prompt in self.prompts]

    @property
    def levels(self) -> list[int | None]:
        return [prompt.level for prompt in self.prompts]


@dataclass(frozen=True)
class Answers:
    """Of every loop to every prompt, as numbers, with what these stand for."""

    numbers: "Tensor"
    """(R, N)."""
    names: tuple[str, ...]
    right: "Tensor | None"
    """(N,), where known."""


def ask(subject: Subject, source: Source, count: int = 1000) -> Asked:
    """Loads the model and reads its prompts, `count` unless the source says how many.

    Raises UserError for anything that is wrong with either.
    """
    from looplm.analysis.prompts import PAIR_LABELS
    from looplm.analysis.readout import spelled_labels

    if sum(one is not None for one in (source.prompts, source.pairs, source.generator)) != 1:
        raise UserError("Give the prompts by one of --prompts, --pairs and --generator.")
    model, view = load_view(subject)
    tokenizer = tokenizer_of(subject.checkpoint)
    prompts = asked_prompts(subject, source, tokenizer, count if source.count is None else source.count)
    names = source.labels.split(",") if source.labels else list(PAIR_LABELS) if source.pairs is not None else None
    if names is not None and tokenizer is None:
        raise UserError(f"{subject.checkpoint} has no tokenizer to find the labels' tokens with; leave --labels out.")
    labels = (
        None if names is None or tokenizer is None else spelled_labels(tokenizer, [name.strip() for name in names])
    )
    check_prompts(model, prompts)
    return Asked(model, view, tokenizer, prompts, labels)


def load_view(subject: Subject) -> "tuple[LoopLMForCausalLM, LoopLM]":
    """The model, and what is looked into."""
    from looplm.analysis.layers_as_loops import layers_as_loops
    from looplm.hf.load import load

    model = load(subject.checkpoint, dtype=subject.dtype, device=subject.device)
    per_loop = subject.layers_per_loop
    return model, model if per_loop is None else layers_as_loops(model, per_loop)


def asked_prompts(
    subject: Subject, source: Source, tokenizer: "PreTrainedTokenizerBase | None", count: int
) -> "list[AskedPrompt]":
    """At most `count` prompts of the source that is given."""
    from looplm.analysis.prompts import read_pairs, read_prompts

    encode = None if tokenizer is None else encoder(tokenizer, subject.chat)
    if source.generator is not None:
        levels = None if source.levels is None else whole_numbers(source.levels, "--levels")
        return generator_prompts(source.generator, parse_arguments(source.arguments), levels, count, subject.seed)
    if source.levels is not None:
        raise UserError("--levels chooses questions of a task of the lab; give it by --generator.")
    if source.pairs is not None:
        if encode is None:
            raise UserError(f"{subject.checkpoint} has no tokenizer, and pairs of questions are text.")
        return read_pairs(source.pairs, encode, count=count, seed=subject.seed)
    assert source.prompts is not None
    return read_prompts(source.prompts, encode)[:count]


def generator_prompts(
    function: str, arguments: Mapping[str, Any], levels: Sequence[int] | None, count: int, seed: int
) -> "list[AskedPrompt]":
    """Of a task of the lab: held-out questions, as many of each level. Of any other generator: its first documents.

    Raises UserError for levels of what is no task of the lab, and for fewer questions than levels.
    """
    from looplm.analysis.prompts import AskedPrompt, generated_prompts
    from looplm.data.recipe import GeneratorSource
    from looplm.data.sources import import_function
    from looplm.lab.task import TaskDocuments

    source = GeneratorSource(kind="generator", format="tokens", function=function, arguments=dict(arguments))
    try:
        documents = import_function(source)(**arguments)
    except TypeError as error:
        raise UserError(f"{function} with arguments {arguments}: {error}.") from error
    if not isinstance(documents, TaskDocuments):
        if levels is not None:
            raise UserError(f"{function} is no task of the lab, so --levels means nothing to it.")
        return generated_prompts(function, arguments, count)
    task = documents.task
    wanted = task.levels if levels is None else levels
    if count < len(wanted):
        raise UserError(f"{count} questions are fewer than the {len(wanted)} levels; raise --count.")
    return [
        AskedPrompt(tuple(question[:-1]), question[-1], level=level)
        for level in wanted
        for question in task.questions(level, count // len(wanted), seed).tolist()
    ]


def whole_numbers(text: str, option: str) -> list[int]:
    """Numbers with commas. Raises UserError for anything else."""
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise UserError(f"{option} is {text!r}; give whole numbers with commas, such as 1,2.") from None


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
    tokens = right_tokens(asked.prompts, asked.tokenizer)
    known = None if tokens is None else torch.tensor(tokens)
    together, ids = ranked(free if known is None else torch.cat((free, known[None])), NAMED_ANSWERS)
    names = tuple(token_names(ids, asked.tokenizer).values())
    return Answers(together[: len(free)], names, None if known is None else together[-1])


def right_tokens(prompts: "Sequence[AskedPrompt]", tokenizer: "PreTrainedTokenizerBase | None") -> list[int] | None:
    """The token that begins each right answer; None unless all are known."""
    from looplm.analysis.prompts import answers_given

    given = answers_given(prompts)
    return None if given is None else [answer_token(one, tokenizer) for one in given]


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
