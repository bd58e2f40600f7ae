"""Makes transformers' Auto classes know the two architectures."""

from transformers import AutoConfig, AutoModelForCausalLM

from looplm.hf.config import LoopLMConfig, OuroConfig
from looplm.hf.modeling import LoopLMForCausalLM, OuroForCausalLM


def register() -> None:
    """`AutoConfig` and `AutoModelForCausalLM` read "looplm" and "ouro" directories from now on, with no remote code.

    Called on the first use of any public name of looplm; calling it again changes nothing.
    """
    AutoConfig.register(LoopLMConfig.model_type, LoopLMConfig, exist_ok=True)
    AutoConfig.register(OuroConfig.model_type, OuroConfig, exist_ok=True)
    AutoModelForCausalLM.register(LoopLMConfig, LoopLMForCausalLM, exist_ok=True)
    AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM, exist_ok=True)
