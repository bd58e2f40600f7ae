"""Small models: random ones, and one whose circuit is written by hand."""

from collections.abc import Callable

import pytest
import torch

from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.config import LoopedConfig

FILLER, QUERY = 4, 5


@pytest.fixture
def make_model() -> Callable[..., LoopLMForCausalLM]:
    """Builds a random model in float64."""

    def build(**changes: object) -> LoopLMForCausalLM:
        sizes = {
            "vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_loops": 3,
            "initializer_range": 0.4,
        }  # fmt: skip
        config = LoopedConfig(**(sizes | changes))  # type: ignore[arg-type]
        return LoopLMForCausalLM(LoopLMConfig.from_model_config(config)).double().eval()

    return build


@pytest.fixture
def circuit() -> LoopLMForCausalLM:
    """A model that answers with the token (0 to 3) that stands somewhere in the prompt, and takes two loops for it.

    Channels 0-3 hold the token, 4-7 its value, 8-11 the answer, 12 is always 1. In each loop attention, the same for
    all positions, moves values to answers, and after it the MLP turns tokens into values where they stand. After loop
    1 only the token's own position knows the value; after loop 2 the last position has the answer.
    """
    config = LoopedConfig(
        vocab_size=6, hidden_size=16, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, num_loops=2, norm_placement="pre", final_norm="none",
    )  # fmt: skip
    model = LoopLMForCausalLM(LoopLMConfig.from_model_config(config)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        core, layer = model.model, model.model.layers[0]
        layer.input_layernorm.weight.fill_(1)
        layer.post_attention_layernorm.weight.fill_(1)
        core.embed_tokens.weight[:, 12] = 1
        eye = torch.eye(4, dtype=torch.float64)
        core.embed_tokens.weight[:4, :4] = eye
        layer.self_attn.v_proj.weight[:4, 4:8] = eye
        layer.self_attn.o_proj.weight[8:12, :4] = eye
        layer.mlp.gate_proj.weight[:, 12] = 1
        layer.mlp.up_proj.weight[:, :4] = eye
        layer.mlp.down_proj.weight[4:8] = eye
        model.lm_head.weight[:4, 8:12] = 20 * eye
    return model
