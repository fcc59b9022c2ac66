"""The gradients of single examples of a small model, and the norms of their noise.

The paper's assumption is about these norms, ‖G^i − ∇f‖_F. :mod:`polarstep.theory.tail_index` estimates
their tail index. For a model of which N gradients do not fit into memory, use
:mod:`polarstep_lab.checks.noise`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["noise_norms", "per_sample_gradients"]


def per_sample_gradients(
    model: nn.Module,
    loss: Callable[..., Tensor],
    inputs: Tensor,
    targets: Tensor,
    chunk_size: int | None = None,
) -> dict[str, Tensor]:
    """The gradient of every single example, by parameter name: shape ``(N, *parameter.shape)``.

    ``loss(output, target)`` is called with a batch of one. Parameters and buffers of the model are
    not changed. ``chunk_size`` limits how many gradients are computed at a time. Models that mix
    examples (batch normalization in training mode) have no per-sample gradients.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__} in training mode, which mixes the "
                "examples of a batch: expected a model with a gradient for each example; call "
                "model.eval(), or use another normalization"
            )
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    rest = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    buffers = {name: b.detach() for name, b in model.named_buffers()}

    def one(weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Any:
        output = functional_call(model, ({**weights, **rest}, buffers), (x[None],))
        return loss(output, y[None])

    gradients = vmap(grad(one), in_dims=(None, 0, 0), randomness="different", chunk_size=chunk_size)
    result: dict[str, Tensor] = gradients(params, inputs, targets)
    return result


def noise_norms(gradients: Tensor) -> Tensor:
    """‖G^i − Ḡ‖_F of per-sample gradients ``(N, ...)``, the norms in the assumption on the noise."""
    if gradients.ndim < 2 or len(gradients) < 2:
        raise ValueError(
            f"gradients have shape {tuple(gradients.shape)}: expected (N, ...) with at least two "
            "examples, since noise is the difference of an example from the mean"
        )
    flat = gradients.detach().flatten(1)
    flat = flat.float() if flat.dtype.itemsize < 4 else flat
    return torch.linalg.vector_norm(flat - flat.mean(0), dim=1)
