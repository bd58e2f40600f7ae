"""`looplm bench decode | exit | speculative | batch | memory`: what the engine promises, measured on this machine."""

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.bench.figures import Figure
    from looplm.bench.generation import DecodeSizes

Smoke = Annotated[bool, typer.Option("--smoke", help="Tiny sizes, to see that it runs.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: bf16 or fp32.")]
Batches = Annotated[str, typer.Option(help="Rows at a time, with commas.")]
Hidden = Annotated[int, typer.Option(help="Hidden size.", min=2)]
Layers = Annotated[int, typer.Option(help="Layers of the core.", min=1)]
Vocabulary = Annotated[int, typer.Option(help="Vocabulary.", min=2)]
Tokens = Annotated[int, typer.Option(help="Tokens of each text.", min=2)]
Repeats = Annotated[int, typer.Option(help="Timed runs of each side.", min=1)]
PromptTokens = Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)]
Generator = Annotated[
    str | None,
    typer.Option(help="Prompts of a task, as looplm.lab.fold:documents, with --checkpoint.", show_default=False),
]
Arguments = Annotated[str, typer.Option(help="The generator's arguments, as JSON.")]
Checkpoint = Annotated[
    str | None, typer.Option(help="Measure this directory, hub name or shipped checkpoint; random weights without.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")]

TASK_TEXTS = 64
"""Texts of a task that are timed together."""


def decode(
    smoke: Smoke = False,
    batch_sizes: Batches = "1,8,32",
    checkpoint: Checkpoint = None,
    dtype: Dtype = "bf16",
    hidden_size: Hidden = 512,
    num_layers: Layers = 6,
    vocab_size: Vocabulary = 8192,
    max_tokens: Tokens = 48,
    repeats: Repeats = 5,
    json_file: Json = None,
) -> None:
    """All loops, against transformers' generate on a dense Llama of R x L layers that share the storage of L."""
    from looplm.bench.generation import model_for
    from looplm.bench.inference import full_depth

    sizes = _sizes(smoke, dtype, hidden_size, num_layers, vocab_size, max_tokens, repeats)
    model, sizes = model_for(sizes, checkpoint)
    batches = _numbers("--batch-sizes", "1,2" if smoke else batch_sizes)
    _show(full_depth(model, sizes, batches), sizes, json_file)


def early_exit(
    smoke: Smoke = False,
    batch_sizes: Batches = "1,32",
    checkpoint: Checkpoint = None,
    quantile: Annotated[float, typer.Option(help="Exit threshold, with --checkpoint.", min=0, max=1)] = 0.5,
    generator: Generator = None,
    arguments: Arguments = "{}",
    prompt_tokens: PromptTokens = 32,
    dtype: Dtype = "bf16",
    hidden_size: Hidden = 512,
    num_layers: Layers = 6,
    vocab_size: Vocabulary = 8192,
    max_tokens: Tokens = 48,
    repeats: Repeats = 5,
    quality: Annotated[
        str,
        typer.Option(help='Trained checkpoint to measure the loss of quality of fill and last on; "": none.'),
    ] = "stdlib-small",
    json_file: Json = None,
) -> None:
    """Early exit against full depth, and against a batch that waits for its deepest row.

    Without --checkpoint depths are scripted: 1 to 4 at 40, 30, 20 and 10 %. With it they are those of its gate, on
    held-out text of the standard library or, with --generator, on the beginnings of a task's questions.

    Under fill and last the text changes; how much worse it gets is measured on a trained checkpoint, at its own exits.
    """
    from looplm.bench.caches import exit_quality
    from looplm.bench.generation import model_for
    from looplm.bench.inference import early_exit as measure

    sizes = _sizes(smoke, dtype, hidden_size, num_layers, vocab_size, max_tokens, repeats, prompt_tokens)
    model, sizes = model_for(sizes, checkpoint)
    batches = _numbers("--batch-sizes", "1,2" if smoke else batch_sizes)
    prompts = _prompts(checkpoint, sizes, generator, arguments)
    threshold = None if checkpoint is None else quantile
    # A task's texts are short: several batches of them.
    texts = 1 if generator is None else TASK_TEXTS
    figures = chain(
        measure(model, sizes, batches, lambda batch: prompts(max(batch, texts // batch * batch)), threshold),
        exit_quality(quality, ["per_loop", "fill", "last"]) if quality and not smoke else (),
    )
    _show(figures, sizes, json_file)


def speculative(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a hub name, or the checkpoint that ships.")] = (
        "stdlib-small"
    ),
    draft_loops: Annotated[int, typer.Option(help="Loop to draft from.", min=1)] = 1,
    draft_tokens: Annotated[str, typer.Option(help="Draft lengths, with commas; 0 adapts.")] = "1,2,3,4,0",
    draft_vocab: Annotated[
        int | None, typer.Option(help="Draft among so many of the lowest ids.  [all]", min=1, show_default=False)
    ] = None,
    texts: Annotated[int, typer.Option(help="Texts, one after another.", min=1)] = 4,
    prompt_tokens: PromptTokens = 32,
    dtype: Dtype = "fp32",
    max_tokens: Tokens = 64,
    repeats: Repeats = 5,
    json_file: Json = None,
) -> None:
    """Self-speculative decoding at batch 1 on a trained CHECKPOINT, against full depth and what counts predict.

    Prompts are held-out text of the standard library. The prediction is what the counts of passes and reads come to
    at the cost of each, which is measured without drafts, Python included.
    """
    from looplm.bench.generation import DecodeSizes, model_for
    from looplm.bench.inference import speculation

    asked = DecodeSizes(dtype=dtype, prompt_tokens=prompt_tokens, max_tokens=max_tokens, repeats=repeats)
    model, sizes = model_for(asked, checkpoint)
    lengths = [length or None for length in _numbers("--draft-tokens", draft_tokens, least=0)]
    prompts = _prompts(checkpoint, sizes, None, "{}")(texts)
    _show(speculation(model, sizes, draft_loops, lengths, draft_vocab, prompts), sizes, json_file)


def batch(
    smoke: Smoke = False,
    batch_sizes: Batches = "1,4,16,64",
    contexts: Annotated[str, typer.Option(help="Tokens before the text, with commas.")] = "128,512,2048,8192",
    dtype: Dtype = "bf16",
    hidden_size: Hidden = 512,
    num_layers: Layers = 6,
    vocab_size: Vocabulary = 8192,
    max_tokens: Tokens = 8,
    json_file: Json = None,
) -> None:
    """Time of a token with context and batch, and what memory says it should be. Medians over the steps of a text."""
    from looplm.bench.inference import growth

    sizes = _sizes(smoke, dtype, hidden_size, num_layers, vocab_size, max_tokens, max_tokens - 2)
    batches = _numbers("--batch-sizes", "1,2" if smoke else batch_sizes)
    _show(growth(sizes, batches, _numbers("--contexts", "8,16" if smoke else contexts)), sizes, json_file)


def memory(
    smoke: Smoke = False,
    context: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 512,
    dtype: Dtype = "bf16",
    hidden_size: Hidden = 512,
    num_layers: Layers = 6,
    json_file: Json = None,
) -> None:
    """Bytes of keys and values under every cache strategy, at the peak over prompt and text."""
    from looplm.bench.inference import memory as measure

    sizes = _sizes(smoke, dtype, hidden_size, num_layers, 8192, 8, 1)
    _show(measure(sizes, 32 if smoke else context), sizes, json_file)


def _prompts(
    checkpoint: str | None, sizes: "DecodeSizes", generator: str | None, arguments: str
) -> "Callable[[int], list[list[int]]]":
    """Where prompts come from: a task, held-out text, or random tokens where the weights are random."""
    from looplm.bench.generation import random_prompts
    from looplm.bench.prompts import task_prompts, text_prompts
    from looplm.cli.analyze_inputs import parse_arguments

    length = sizes.prompt_tokens
    if checkpoint is None:
        if generator is not None:
            raise UserError("--generator asks a trained model: give a --checkpoint with it.")
        return lambda count: random_prompts(count, length, sizes.vocab_size)
    if generator is None:
        return lambda count: text_prompts(checkpoint, count, length)
    return lambda count: task_prompts(generator, parse_arguments(arguments), count, length)


def _sizes(
    smoke: bool,
    dtype: str,
    hidden_size: int,
    num_layers: int,
    vocab_size: int,
    max_tokens: int,
    repeats: int,
    prompt_tokens: int = 32,
) -> "DecodeSizes":
    import dataclasses

    from looplm.bench.generation import SMOKE, DecodeSizes

    if smoke:
        return dataclasses.replace(SMOKE, dtype=dtype)
    return DecodeSizes(
        hidden_size=hidden_size,
        intermediate_size=11 * hidden_size // 4,
        num_layers=num_layers,
        vocab_size=vocab_size,
        dtype=dtype,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        repeats=repeats,
    )


def _numbers(name: str, text: str, least: int = 1) -> list[int]:
    """Whole numbers with commas between them. Raises UserError for anything else."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise UserError(f"{name} is {text!r}; give whole numbers from {least}, with commas between them.")
    return numbers


def _show(figures: "Iterable[Figure]", sizes: "DecodeSizes", json_file: Path | None) -> None:
    """Prints the machine, the sizes and every figure as it comes; writes them to `json_file` in the end."""
    import dataclasses
    import json
    import platform

    import torch
    from rich.console import Console

    from looplm.cli.json_file import check_writable

    if json_file is not None:
        check_writable(json_file)
    sizes.dtype_of()
    console = Console(highlight=False)
    vector = torch.backends.cpu.get_cpu_capability()
    console.print(
        f"{platform.machine()} with {vector}, {torch.get_num_threads()} threads, torch {torch.__version__}; hidden "
        f"{sizes.hidden_size}, {sizes.num_layers} layers, {sizes.num_loops} loops, vocabulary {sizes.vocab_size:,}, "
        f"{sizes.dtype}; medians of {sizes.repeats}, sides in turn",
        soft_wrap=True,
    )
    done: list[dict[str, object]] = []
    for figure in figures:
        console.print(f"  {figure.what}: {figure.value}", soft_wrap=True)
        done.append(dataclasses.asdict(figure))
    if json_file is not None:
        report = {"sizes": dataclasses.asdict(sizes), "cpu": vector, "figures": done}
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
