"""Where a step went wrong: the first number that is not finite, by the name of its layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from perilune.train.team import Team
from perilune.train.whole_blocks import own_part

ELSEWHERE = "something on another rank"


@torch.no_grad()
def first_non_finite(model: nn.Module, loss: Tensor, run: Callable[[], object], team: Team) -> str:
    """What broke first, in one clause: a weight, a layer's output (`run` is the forward pass once
    more), or a gradient. All ranks ask together; those that see nothing wrong say so."""
    device = str(loss.device.type)
    weight = _first_bad(dict(model.named_parameters()))
    if team.any(weight is not None, device):
        return f"the weight {weight or ELSEWHERE} is not finite"
    if not torch.isfinite(loss):
        output = _first_bad_output(model, run)
        if team.any(output is not None, device):
            return f"the output of {output or ELSEWHERE} is not finite, although every weight is"
        return f"the loss is {float(loss)}, although all weights and layers' outputs are finite"
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    grad = _first_bad(grads)
    if team.any(grad is not None, device):
        return f"the gradient of {grad or ELSEWHERE} is not finite"
    return "the norm of the gradients overflows"


def _first_bad(named: dict[str, Any]) -> str | None:
    return next((n for n, x in named.items() if not torch.isfinite(own_part(x)).all()), None)


def _first_bad_output(model: nn.Module, run: Callable[[], object]) -> str | None:
    """The module that is the first to end with something that is not finite: the innermost one."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def check(_: nn.Module, __: object, output: object) -> None:
            if not found and any(not torch.isfinite(x).all() for x in _floats(output)):
                found.append(name)

        return check

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(watch(name)).remove)
        run()
    return found[0] if found else None


def _floats(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, tuple):
        return [x for part in output for x in _floats(part)]
    return []
