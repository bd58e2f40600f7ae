"""Block masks say the same as dense ones; on a GPU the whole model agrees, gradients included."""

import pytest
import torch

from looplm.model.config import LoopedConfig
from looplm.model.flex import block_attention, document_block_mask, packs_in_blocks
from looplm.model.looped import LoopedTransformer
from looplm.model.mask import causal_mask

CONFIG = LoopedConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_loops=2,
)  # fmt: skip


def packed_rows(seq_len: int) -> torch.Tensor:
    """Two rows of documents of uneven lengths."""
    torch.manual_seed(0)
    return (torch.rand(2, seq_len) < 0.05).long().cumsum(1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seq_len", [7, 128, 200])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_blocks_equal_the_dense_mask(seq_len: int, num_kv_heads: int) -> None:
    documents = packed_rows(seq_len)
    q = torch.randn(2, 4, seq_len, 16)
    k, v = torch.randn(2, 2, num_kv_heads, seq_len, 16)
    dense = causal_mask(torch.arange(seq_len)[None], seq_len, None, documents)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    with torch.no_grad():
        got = block_attention(q, k, v, document_block_mask(documents))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_dense_masks_stay_on_the_cpu() -> None:
    documents = packed_rows(8)
    assert not packs_in_blocks(documents, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_rows_on_a_gpu_equal_the_cpu(compiled: bool) -> None:
    torch.manual_seed(1)
    model = LoopedTransformer(CONFIG)
    ids, documents = torch.randint(64, (2, 200)), packed_rows(200)
    gradients = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        if device == "cuda" and compiled:
            for layer in model.layers:
                layer.forward = torch.compile(layer.forward)
        output = model(ids.to(device), document_ids=documents.to(device))
        output.loop_hidden_states[-1].square().sum().backward()
        gradients.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    for on_cpu, on_gpu in zip(*gradients, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-3)
