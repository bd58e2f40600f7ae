"""A byte-level BPE tokenizer, trained on the run's own text, with the special tokens that Ouro and SmolLM2 use.

Byte-level means lossless: every string of Unicode text is encoded, and decoding gives back the same bytes.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from looplm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2, as in Ouro's vocabulary
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256  # below it some byte would have no token

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE on `texts` and return it ready for a checkpoint directory.

    Digits are single tokens and words split as in GPT-2, both as in SmolLM2. `<|endoftext|>` is the beginning, end
    and padding token; the chat template is ChatML.

    Args:
        texts: the training text, any number of pieces.
        vocab_size: tokens in all, the three special ones and the 256 bytes included. Text too small to justify that
            many merges gives a smaller vocabulary (`len(tokenizer)` tells).

    Raises:
        UserError: `vocab_size` has no room for every byte.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"A vocabulary of {vocab_size} tokens is too small: a byte-level tokenizer needs {MIN_VOCAB_SIZE} for "
            "the 256 bytes and the special tokens. Give a larger vocab_size."
        )
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode_plain(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Token ids of each text, nothing added, and a special token spelled out in a text taken as the text it is.

    Were `<|endoftext|>` in a source file read as the token, it would cut the document in two.
    """
    encoding = tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        verbose=False,  # documents longer than the model's context are the rule here
    )
    return encoding["input_ids"]


def boundary_token_ids(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, int]:
    """The tokens put before and after a document: bos (or eos where the vocabulary has no bos) and eos.

    Raises:
        UserError: the tokenizer has no end-of-text token.
    """
    start_id, end_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    if not isinstance(end_id, int):
        raise UserError(
            "The tokenizer has no end-of-text token, so documents cannot be told apart. Set its eos_token."
        )
    return (start_id if isinstance(start_id, int) else end_id), end_id


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase", *, with_chat_template: bool) -> str:
    """A digest of all that decides which ids a text becomes, by which stored tokens are known to fit.

    Args:
        tokenizer: a fast one.
        with_chat_template: whether the chat template decides too, as it does for conversations.

    Raises:
        UserError: the tokenizer is not a fast one (one with a tokenizer.json).
    """
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, and texts cannot be tokenised in batches or told "
            "apart by it. Convert it to a tokenizer.json (transformers does it on loading, where it can)."
        )
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for last_call in ("padding", "truncation"):  # set by whoever called the tokenizer last, and reset by the next
        del backend[last_call]
    template = tokenizer.chat_template if with_chat_template else None
    parts = [backend, tokenizer.bos_token_id, tokenizer.eos_token_id, template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def require_vocabulary(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> None:
    """Check that a model of `vocab_size` tokens has an embedding for every token.

    Raises:
        UserError: the tokenizer has more tokens than that.
    """
    if len(tokenizer) > vocab_size:
        raise UserError(
            f"The tokenizer has {len(tokenizer)} tokens and the model a vocabulary of {vocab_size}: the last "
            f"{len(tokenizer) - vocab_size} would have no embedding. Use the model's own tokenizer, or give the model "
            "a larger vocab_size."
        )
