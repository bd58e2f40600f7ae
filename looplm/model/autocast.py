"""What autocast does to the input of matrix products, done once where several of them read the same input."""

import torch
from jaxtyping import Float
from torch import Tensor


def matmul_input(x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
    """x as autocast would cast it for a matrix product; x itself outside of autocast.

    Autocast casts an activation anew for every product and keeps each copy for the backward pass.
    """
    device = x.device.type
    if x.dtype is not torch.float32 or not torch.amp.is_autocast_available(device):
        return x
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
