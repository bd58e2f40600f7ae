"""What the options of `looplm generate` mean, and which of them do not go together."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.inference import ExitPolicy, Speculation
    from looplm.model.flops import CacheStrategy


@dataclass(kw_only=True, frozen=True)
class Depth:
    """How deep tokens go, as the options say it."""

    num_loops: int | None
    exit_threshold: float | None
    exit: str | None
    kv_cache: str
    draft_loops: int | None
    draft_tokens: int | None
    draft_vocab: int | None

    def check(self) -> None:
        """Raises UserError for options that do not go together."""
        given = {"--num-loops": self.num_loops, "--exit-threshold": self.exit_threshold, "--exit": self.exit}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise UserError(
                f"{' and '.join(named)} each say when a token leaves (--num-loops fixes the depth, the others let "
                "each token choose); give one of them."
            )
        if self.draft_loops is None:
            if self.draft_tokens is not None:
                raise UserError("--draft-tokens is how many tokens --draft-loops drafts; give both, or neither.")
            if self.draft_vocab is not None:
                raise UserError("--draft-vocab is what --draft-loops may draft; give both, or neither.")
        if self.draft_loops is not None and self.num_loops is not None and self.draft_loops >= self.num_loops:
            raise UserError(
                f"--draft-loops is {self.draft_loops}, but every token leaves at loop {self.num_loops}: nothing would "
                "test a draft. Give an earlier loop, or leave it out."
            )
        if self.draft_loops is not None and self.kv_cache != "per_loop":
            raise UserError(f"--draft-loops needs --kv-cache per_loop, not {self.kv_cache}.")
        check_kv_cache(self.kv_cache)

    def policy(self) -> "ExitPolicy | None":
        """The policy that is asked for; None leaves it to the checkpoint. Raises UserError when impossible."""
        from looplm.inference import FixedDepth, QuantileExit

        if self.num_loops is not None:
            return FixedDepth(self.num_loops)
        if self.exit is not None:
            from looplm.inference.exit_policy import parse_exit

            return parse_exit(self.exit, "--exit")
        return None if self.exit_threshold is None else QuantileExit(self.exit_threshold)

    def speculation(self) -> "Speculation | None":
        """What is drafted, if anything. Raises UserError when impossible."""
        from looplm.inference import Speculation

        if self.draft_loops is None:
            return None
        return Speculation(self.draft_loops, self.draft_tokens, self.draft_vocab)

    def settings(self) -> dict[str, Any]:
        """What answers in a file are marked with."""
        return {
            "num_loops": self.num_loops,
            "exit_threshold": self.exit_threshold,
            "exit": self.exit,
            "kv_cache": self.kv_cache,
            "draft_loops": self.draft_loops,
            "draft_tokens": self.draft_tokens,
            "draft_vocab": self.draft_vocab,
        }


def check_kv_cache(name: str) -> "CacheStrategy":
    """`name` as a cache strategy. Raises UserError when there is none of that name."""
    from looplm.model.flops import CacheStrategy

    for strategy in get_args(CacheStrategy):
        if name == strategy:
            return strategy
    raise UserError(f"--kv-cache is {name!r}; choose one of {', '.join(get_args(CacheStrategy))}.")


def check_sources(
    prompt: str | None, interactive: bool, input: Path | None, output: Path | None, show_depth: bool
) -> None:
    """Raises UserError unless there is one source of prompts, with what goes with it."""
    if (prompt is not None) + interactive + (input is not None) != 1:
        raise UserError("Give either --prompt TEXT, or --interactive, or --input with a file of prompts.")
    if (input is None) != (output is None):
        raise UserError("--input and --output go together: a file of prompts, and one for the answers.")
    if input is not None and show_depth:
        raise UserError("--show-depth is for one --prompt; the answers in a file carry the depth of every token.")
