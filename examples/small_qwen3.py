"""Trains a small dense Qwen3 on the standard library's text, for `looplm train small/convert_qwen3_1p7b` to loop.

    python examples/small_qwen3.py runs/small_qwen3

A stand-in for Qwen3-1.7B-Base where there is no network: the same architecture at a size for one core, about a minute.
"""

import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from looplm.data.documents import split_documents
from looplm.data.packing import tokenize_documents
from looplm.data.rows import RowStream
from looplm.data.stdlib_text import load_stdlib_text
from looplm.data.tokenizer import train_tokenizer


def main(directory: Path, num_steps: int = 300, max_bytes: int | None = None) -> None:
    """Trains for `num_steps` steps of 2,048 tokens, on all of the text or `max_bytes` of it, and writes model and
    tokenizer to `directory`."""
    documents = split_documents(load_stdlib_text(max_bytes).documents).train
    tokenizer = train_tokenizer((document.text for document in documents), 1024)
    rows = RowStream.of_tokens(tokenize_documents(documents, tokenizer), seq_len=256, seed=0)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps, pct_start=0.1)
    for step in range(1, num_steps + 1):
        ids = torch.stack([next(rows)["input_ids"] for _ in range(8)])
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == 1:
            print(f"step {step}/{num_steps}: {loss.item():.3f} nats")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    print(f"The dense model is in {directory}.")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/small_qwen3"))
