"""Screening from a shallow loop: what the model is about to say is seen, and stopped or changed, before it is out.

    python examples/screening.py

Three screens on the checkpoint that ships with the package (it writes documentation in the manner of Python's):
the text is ended when the shallow loop is about to open a code block, a word is forbidden, and a text that loses
itself (the shallow loop is unsure of everything) is put back on track. Ouro (arXiv 2510.25741, section 7.3) proposes
this use of a looped model: early loops are cheap, and they say where the last one is going.
"""

import torch

import looplm
from looplm.inference import Mask, Preview, Redirect, Screen, Stop

CHECKPOINT = "stdlib-small"
PROMPT = "Return the number of "


def main() -> None:
    """Prints the plain text and what each screen makes of it."""
    tokenizer = looplm.load_tokenizer(CHECKPOINT)
    engine = looplm.Engine(looplm.load(CHECKPOINT), tokenizer)
    params = looplm.SamplingParams(max_tokens=40)
    all_loops = looplm.FixedDepth(engine.model.model.config.num_loops)

    def ends_before_code(preview: Preview) -> Stop | None:
        """Ends the text where loop 1 gives a line break more than half of the probability."""
        likeliest = int(preview.logprobs.argmax())
        opens = "\n" in tokenizer.decode([likeliest])
        return Stop("a new line") if opens and preview.logprobs[likeliest] > torch.tensor(0.5).log() else None

    forbidden = [i for i in range(len(tokenizer)) if "get" in tokenizer.decode([i]).lower()]

    def never_says_get(preview: Preview) -> Mask:
        """Forbids every token with "get" in it."""
        return Mask(forbidden)

    onward = tokenizer.encode(" See also: ")

    def redirects_when_unsure(preview: Preview) -> Redirect | None:
        """Once, where the entropy of loop 1 is above 4 nats after ten tokens: other words."""
        entropy = -(preview.logprobs.exp() * preview.logprobs).sum()
        said = preview.token_ids
        already = any(said[i : i + len(onward)] == onward for i in range(len(said)))
        return Redirect(onward) if len(said) >= 10 and entropy > 4 and not already else None

    (plain,) = engine.generate([PROMPT], params, all_loops)
    print(f"plain:\n{PROMPT}{plain.text}\n")
    for look in (ends_before_code, never_says_get, redirects_when_unsure):
        # Drafted tokens are screened before they are tested: nothing that is refused is ever out.
        (result,) = engine.generate(
            [PROMPT], params, all_loops, speculation=looplm.inference.Speculation(1, 3), screen=Screen(look)
        )
        print(f"{look.__name__} ({result.finish_reason}):\n{PROMPT}{result.text}\n")


if __name__ == "__main__":
    main()
