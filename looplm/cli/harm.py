"""`looplm harm`: how harmful a checkpoint's answers are at every depth."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from looplm.cli.exit_settings import exits_of, load_for, parts, warn_beyond
from looplm.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from looplm.evaluation.harm import HarmPrompt
    from looplm.evaluation.judge import Judge
    from looplm.evaluation.kept_lines import KeptLines


def harm(
    checkpoint: Annotated[str, typer.Argument(help="A directory or hub name.", show_default=False)],
    prompts: Annotated[Path, typer.Option(help="JSON lines with prompt and category.", show_default=False)],
    judge_url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible address; without it answers are written, not judged.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="The judge's model.")] = None,
    out: Annotated[
        Path, typer.Option(help="Directory of answers and scores; what is there is not made again.")
    ] = Path("harm"),
    num_loops: Annotated[
        str, typer.Option(help="Depths, with commas, also beyond the trained one.")
    ] = "1,2,3,4,5,6,7,8",
    exit_threshold: Annotated[str | None, typer.Option(help="Thresholds of the gate, with commas.")] = None,
    kv_cache: Annotated[
        str, typer.Option(help="How keys of several loops are kept: per_loop (exact), fill, last, mean or first.")
    ] = "per_loop",
    decoding: Annotated[
        str, typer.Option(help="base (greedy, 128 tokens), thinking (temperature 1, top-p 0.7, 8192 tokens), or both.")
    ] = "base",
    max_tokens: Annotated[int | None, typer.Option(help="Instead of 128 or 8192.", min=1)] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the checkpoint's chat template.")] = False,
    limit: Annotated[int | None, typer.Option(help="The first so many prompts.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same answers.", min=0)] = 0,
    rubric: Annotated[str, typer.Option(help="harm, or a file with your own.")] = "harm",
    judge_attempts: Annotated[int, typer.Option(help="Before a judgment counts as missing.", min=1)] = 5,
    judge_timeout: Annotated[float, typer.Option(help="Seconds for one reply.", min=0.1)] = 60.0,
    judge_concurrency: Annotated[int, typer.Option(help="Questions at one time.", min=1)] = 4,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 ...; the checkpoint's own if left out.")] = None,
) -> None:
    """Answer PROMPTS with CHECKPOINT at depths 1 to 8, have a judge score the answers, and tabulate by category."""
    from looplm.cli.analyze_inputs import encoder
    from looplm.cli.judge import judge_of
    from looplm.evaluation.harm import asked_texts, read_harm_prompts
    from looplm.evaluation.kept_lines import KeptLines, check_plan, file_digest, model_digest
    from looplm.evaluation.sampled_texts import KEY, generate_missing
    from looplm.hf.load import load_tokenizer

    if (judge_url is None) != (judge_model is None):
        raise UserError("--judge-url and --judge-model go together; without both, answers are written and not judged.")
    judge = None
    if judge_url is not None and judge_model is not None:
        judge = judge_of(judge_url, judge_model, rubric, out, judge_attempts, judge_timeout, judge_concurrency)
    asked, decodings = read_harm_prompts(prompts)[:limit], list(dict.fromkeys(parts(decoding)))
    plan = {
        "prompts": file_digest(prompts), "checkpoint": checkpoint,
        "kv_cache": kv_cache, "max_tokens": max_tokens, "chat": chat, "seed": seed, "device": device or "cpu",
        "dtype": dtype,
    }  # fmt: skip
    engine = load_for(checkpoint, device, dtype, kv_cache)
    exits = exits_of(num_loops, exit_threshold, None, engine.model.model.config.num_loops)
    warn_beyond(exits, engine.model.model.config.num_loops)
    encode = encoder(load_tokenizer(checkpoint), chat)
    wanted = asked_texts(asked, decodings, encode, max_tokens)
    check_plan(
        out, plan | {"weights": model_digest(engine.model.model, engine.model.lm_head)}
    )  # now that nothing is wrong with it
    texts = KeptLines(out / "answers.jsonl", KEY)
    generate_missing(engine, exits, wanted, texts, seed=seed)
    if judge is None:
        print(f"Answers are in {texts.path}; run again with --judge-url and --judge-model to have them scored.")
        return
    report(out, asked, decodings, list(exits), texts, judge, checkpoint)


def report(
    out: Path,
    asked: "Sequence[HarmPrompt]",
    decodings: "Sequence[str]",
    settings: "Sequence[str]",
    texts: "KeptLines",
    judge: "Judge",
    checkpoint: str,
) -> None:
    """Has answers judged, and writes table, page and numbers."""
    from looplm.evaluation.harm import harm_scores, judge_answers
    from looplm.report.analysis_page import write_analysis
    from looplm.report.judge_section import harm_cells, harm_section, missing_note
    from looplm.report.task_section import markdown

    judgments = judge_answers(asked, decodings, settings, texts, judge)
    scores = harm_scores(asked, judgments)
    table = (
        f"{markdown(harm_cells(scores))}\n{missing_note([one for several in judgments.values() for one in several])}\n"
    )
    (out / "harm.md").write_text(table, encoding="utf-8")
    about = (
        f"{len(asked)} prompts answered by {checkpoint}, scored by {judge.endpoint.model} with the rubric "
        f"{judge.rubric.name}."
    )
    write_analysis(out, "harm", about, harm_section(scores), {"scores": scores})
    print(table)
