"""What the quickstart trains and for how long: one plan in full, one for `--smoke`."""

from looplm.strict import Strict
from looplm.training.text_model import TextRecipe

SHIPPED = "stdlib-small"
"""Name of the checkpoint that ships with the package."""

SHIPPED_THRESHOLD = 0.3
"""Exit threshold saved in it: a quarter of the weight passes at the quality of all loops (docs/log.md)."""

SHIPPED_RECIPE = TextRecipe(
    vocab_size=2048,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=1,
    num_heads=6,
    num_loops=4,
    seq_len=512,
    batch_size=4,
    lr=4e-3,
    beta=0.1,
    smoothing=0.2,
    warmup_steps=400,
    num_steps=5_500,
    num_gate_steps=400,
    compile=True,
)
"""How the shipped checkpoint was trained (`examples/train_shipped_checkpoint.py`)."""


class Plan(Strict):
    """Sizes of one quickstart."""

    text: TextRecipe
    """Shape of the new text model; its `num_steps` is an upper bound, see `text_seconds`."""
    text_seconds: float
    """Stage I of the text model takes about this long: the number of steps follows from the measured pace."""
    min_steps: int
    """Steps that are made however slow the machine."""
    corpus_bytes: int | None
    """Cap on the standard library's text; None takes all of it."""
    held_out_documents: int | None
    """Cap on the documents that are measured on; None measures on all."""
    extra_loops: int
    """Loops beyond the trained depth that are measured too."""
    sample_tokens: int
    fold_steps: int
    fold_gate_steps: int


TEXT_RECIPE = TextRecipe(
    vocab_size=1024,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=1,
    num_heads=6,
    lr=4e-3,
    beta=0.1,
    smoothing=0.2,
    batch_size=4,
    num_steps=2_400,
    num_gate_steps=300,
)

FULL = Plan(
    text=TEXT_RECIPE,
    text_seconds=200.0,
    min_steps=1_200,
    corpus_bytes=None,
    held_out_documents=None,
    extra_loops=2,
    sample_tokens=160,
    fold_steps=1500,
    fold_gate_steps=200,
)

SMOKE = Plan(
    text=TEXT_RECIPE.model_copy(update={"hidden_size": 64, "intermediate_size": 160, "num_heads": 2, "vocab_size": 512,
                                        "num_steps": 40, "num_gate_steps": 10, "seq_len": 128}),
    text_seconds=5.0,
    min_steps=20,
    corpus_bytes=1_000_000,
    held_out_documents=6,
    extra_loops=1,
    sample_tokens=24,
    fold_steps=30,
    fold_gate_steps=10,
)  # fmt: skip
