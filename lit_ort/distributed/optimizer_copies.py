"""Copies of optimizers with other parameters."""

from __future__ import annotations

from collections import defaultdict

import torch

from lit_ort._compat.torch_optim import forget_step_hooks

# Estimates of a distance to the optimum, as Prodigy's, need some steps to show.
_TRIED_STEPS = 20


def copy_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy without the optimizer's constructor, whose arguments are unknown; groups and state are shared."""
    copied = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    # The wrapper of a learning rate scheduler, which would step the complete optimizer.
    copied.__dict__.pop("step", None)
    return copied


def depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a copy of an optimizer updates a parameter in another way if there is a second one.

    Those of torch don't; of others it is tried with two small parameters.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return False
    try:
        alone, together = (_updated(optimizer, count) for count in (1, 2))
    # An optimizer of one's own can raise anything, such as for a state that its constructor creates.
    except Exception:
        return False
    return not torch.equal(alone, together)


def _updated(optimizer: torch.optim.Optimizer, count: int) -> torch.Tensor:
    """The first of some parameters after steps to a target with noise, in which the second one's gradient is large."""
    copied = copy_of(optimizer)
    forget_step_hooks(copied)
    dtype = optimizer.param_groups[0]["params"][0].dtype
    parameters = [torch.nn.Parameter(torch.ones(4, 4, dtype=dtype)) for _ in range(count)]
    # A schedule can start at a learning rate of zero.
    rate = optimizer.defaults.get("lr") or 1e-2
    copied.param_groups = [{**optimizer.param_groups[0], "lr": rate, "params": parameters}]
    copied.state = defaultdict(dict)
    generators = [torch.Generator().manual_seed(k) for k in range(count)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(_TRIED_STEPS):
            for scale, parameter, generator in zip((1.0, 100.0), parameters, generators, strict=False):
                noise = torch.randn(4, 4, generator=generator).to(dtype)
                parameter.grad = scale * (parameter.detach() - 10 + noise)
            copied.step()
    return parameters[0].detach()
