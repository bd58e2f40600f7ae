"""lm-eval's own command line with the model type `looplm`: `python -m looplm.cli.lm_eval --model looplm ...`.

lm-eval has no way to find models of other packages by itself, so they have to be named to it before it starts.
"""

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from looplm.evaluation.lm_eval_adapter import LoopLMAdapter


def main() -> None:
    """Makes the adapter known under the name looplm and hands over; see `lm_eval --help`."""
    register_model("looplm")(LoopLMAdapter)
    cli_evaluate()


if __name__ == "__main__":
    main()
