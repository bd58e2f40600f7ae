"""`looplm generate`: text from a checkpoint, each token at its own depth; one prompt, or a file of them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from looplm.cli.generate_options import Depth
    from looplm.inference import Engine, ExitPolicy, GenerationResult, SamplingParams

SHIPPED = "stdlib-small"


def generate(
    checkpoint: Annotated[
        str, typer.Argument(help="A directory, a hub name, or the checkpoint that ships.")
    ] = SHIPPED,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    num_loops: Annotated[int | None, typer.Option(help="Leave after this many loops, every token.")] = None,
    exit_threshold: Annotated[
        float | None,
        typer.Option(help="Leave at the first loop whose exit cdf reaches this: 0 after loop 1, 1 after all."),
    ] = None,
    exit: Annotated[
        str | None,
        typer.Option(help="Leave by another rule: hidden-diff:EPS, kl:NATS, stable:LOOPS or deadline:MILLISECONDS."),
    ] = None,
    kv_cache: Annotated[
        str, typer.Option(help="How keys of several loops are kept: per_loop (exact), fill, last, mean or first.")
    ] = "per_loop",
    draft_loops: Annotated[
        int | None, typer.Option(help="Draft tokens at this loop and let the deeper ones test them; text unchanged.")
    ] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="Tokens of a draft; adapted if left out.")] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Draft only so many of the lowest token ids: a cheaper read of the head.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that hold this share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from so many likeliest tokens; 0: from all.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Sample from tokens at least this fraction as likely as the best.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens that stand in prompt or text become less likely.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Prompt i of a file uses seed + i.")] = None,
    show_depth: Annotated[
        bool, typer.Option("--show-depth", help="Colour tokens by loop and count the work.")
    ] = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Ask for prompts, one a line; texts appear as they are written.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="Where to run: cpu, cuda ...")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: bf16, fp32 ...; that of the file if left out.")
    ] = None,
    input: Annotated[
        Path | None, typer.Option(help='JSON lines with a "prompt" each, instead of --prompt.', show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Answers to --input, appended as they come. Run again to go on.")
    ] = None,
) -> None:
    """Continue a prompt with CHECKPOINT, at the checkpoint's own exit threshold unless an option says otherwise.

    Tokens that leave early skip work; with the cache per_loop, text and depths are those of running all loops:
    exactly in float64; in float32 and bfloat16 wherever the margin of choice exceeds rounding.
    """
    from looplm.cli.generate_options import Depth, check_sources
    from looplm.inference import SamplingParams

    depth = Depth(
        num_loops=num_loops,
        exit_threshold=exit_threshold,
        exit=exit,
        kv_cache=kv_cache,
        draft_loops=draft_loops,
        draft_tokens=draft_tokens,
        draft_vocab=draft_vocab,
    )
    depth.check()
    check_sources(prompt, interactive, input, output, show_depth)
    policy, speculation = depth.policy(), depth.speculation()
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    if input is not None and output is not None:
        from looplm.cli.generate_file import answer_file
        from looplm.hf.load import check_device, check_dtype

        check_device(device)
        kept = check_dtype(dtype)
        made_with = {
            "checkpoint": checkpoint,
            **depth.settings(),
            "dtype": None if kept is None else str(kept).removeprefix("torch."),
            "device": device or "cpu",
        }
        answer_file(
            input,
            output,
            made_with,
            sampling,
            policy,
            lambda: load_engine(checkpoint, policy, device, dtype, kv_cache),
            speculation,
        )
        return
    engine = load_engine(checkpoint, policy, device, dtype, kv_cache)
    if policy is None:
        say_saved_rule(engine)
    if interactive:
        converse(engine, sampling, depth, show_depth)
        return
    assert prompt is not None
    answer(engine, prompt, sampling, depth, show_depth)


def answer(engine: "Engine", prompt: str, sampling: "SamplingParams", depth: "Depth", show_depth: bool) -> None:
    """Continues one prompt and prints it. Raises UserError when the model breaks down."""
    (result,) = engine.generate(
        [engine.prompt_token_ids(prompt, sampling)], sampling, depth.policy(), speculation=depth.speculation()
    )
    if result.finish_reason == "error":
        raise UserError(result.error or "The model failed.")
    if show_depth:
        print_depth(engine, prompt, result)
    else:
        print(f"{prompt}{result.text}")


def converse(engine: "Engine", sampling: "SamplingParams", depth: "Depth", show_depth: bool) -> None:
    """Prompts from standard input, each continued on its own, until it ends. What is wrong with one is said."""
    from looplm.inference import EngineStats

    typer.echo("One prompt a line; end with Ctrl-D.", err=True)
    while True:
        typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            typer.echo("", err=True)
            return
        prompt = line.rstrip("\n")
        if not prompt:
            continue
        engine.stats = EngineStats()
        try:
            if show_depth:
                answer(engine, prompt, sampling, depth, show_depth)
            else:
                write(engine, prompt, sampling, depth)
        except UserError as error:
            typer.echo(f"looplm: {error}", err=True)


def write(engine: "Engine", prompt: str, sampling: "SamplingParams", depth: "Depth") -> None:
    """Prints a text while it is written. Raises UserError when the model breaks down."""
    pieces = engine.stream(prompt, sampling, depth.policy(), speculation=depth.speculation())
    for piece in pieces:
        print(piece.text, end="", flush=True)
        if piece.finish_reason == "error":
            print()
            raise UserError("The model gave logits that are not finite: its weights are damaged, or overflow.")
    print()


def load_engine(
    checkpoint: str, policy: "ExitPolicy | None", device: str | None, dtype: str | None, kv_cache: str = "per_loop"
) -> "Engine":
    """Checkpoint and tokenizer as an engine. Warns on stderr when more loops are asked for than were trained."""
    from looplm.hf.checkpoint import CONFIG, find_checkpoint, read_config
    from looplm.hf.load import check_device, load, load_tokenizer
    from looplm.inference import Engine, FixedDepth

    check_device(device)
    read_config(find_checkpoint(checkpoint) / CONFIG)  # or the tokenizer would be blamed for a damaged config
    tokenizer = load_tokenizer(checkpoint)
    model = load(checkpoint, dtype=dtype, device=device)
    trained = model.model.config.num_loops
    if isinstance(policy, FixedDepth) and policy.num_loops > trained:
        typer.echo(
            f"looplm: warning: {policy.num_loops} loops are more than the {trained} this model was trained for; "
            "its text may get worse.",
            err=True,
        )
    return Engine(model, tokenizer, kv_cache=kv_cache)


def say_saved_rule(engine: "Engine") -> None:
    """Says on stderr that the checkpoint has another rule than its gate saved (`looplm calibrate`)."""
    from looplm.inference import HiddenDiffExit

    if isinstance(engine.default_exit, HiddenDiffExit):
        typer.echo(f"looplm: tokens leave by hidden-diff:{engine.default_exit.eps:g}, saved as the default.", err=True)


# --- Showing depth ----------------------------------------------------------------------------------------------


def print_depth(engine: "Engine", prompt: str, result: "GenerationResult") -> None:
    """The text with every token marked by the loop it left at, a legend, and what it cost."""
    from rich.console import Console

    from looplm.inference.text import token_texts
    from looplm.report.depth_text import depth_text, legend

    console = Console(highlight=False)
    colours = console.color_system is not None
    trained = engine.model.model.config.num_loops
    assert engine.tokenizer is not None
    pieces = token_texts(engine.tokenizer, result.token_ids)
    console.print(depth_text(prompt, pieces, result.loops, colours), soft_wrap=True)
    console.print()
    console.print(legend(result.loops, trained, colours), soft_wrap=True)
    console.print(cost_table(engine, result, trained))


def cost_table(engine: "Engine", result: "GenerationResult", trained: int) -> "Table":
    """Claimed depth beside the two counts of work really done, and what all loops would have cost.

    The first token is read out of the prompt, so that decoding runs one position less than there are tokens.
    """
    from rich import box
    from rich.table import Table

    stats, decoded = engine.stats, len(result.token_ids) - 1
    title = f"{decoded + 1} tokens; the prompt apart: {stats.prompt_weight_passes} passes"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "claimed depth", "weight passes", "token-loops"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("this text", f"{stats.mean_loops:.2f}", f"{stats.weight_passes:,}", f"{stats.token_loops:,}")
    if stats.drafted_tokens:
        table.title = f"{title}; {stats.accepted_tokens} of {stats.drafted_tokens} drafts stood"
    table.add_row(f"all {trained} loops", f"{trained:.2f}", *[f"{trained * decoded:,}"] * 2)
    return table
