"""The course of the learning rate, and which parameters decay."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from plait.train.recipe_fields import Optimizer


def factor(schedule: str, warmup: int, steps: int, final: float) -> Callable[[int], float]:
    """The learning rate of each step as a share of the highest.

    Args:
        schedule: "cosine", "linear" or "constant": what comes after the warm-up.
        warmup: Steps of the warm-up; step n of them has the rate (n + 1) / warmup, so that no step
            is lost at rate 0 and the last one has all of it.
        steps: All steps, the warm-up's included.
        final: Share of the highest rate that the decay ends with, just after the last step.

    Returns:
        A function of the number of steps done.

    Source: the cosine is that of Loshchilov and Hutter, SGDR (2017), equation 5, without restarts.
    """

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        left = 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
        return final + (1.0 - final) * left

    return rate


def warmup_steps(warmup: float, steps: int) -> int:
    """The steps that a recipe's `warmup` means: itself, or below 1 a share of all steps."""
    return round(warmup * steps) if warmup < 1 else int(warmup)


def scheduler(optimizer: torch.optim.Optimizer, recipe: Optimizer, steps: int) -> LambdaLR:
    """Torch's scheduler of a recipe's course over `steps` steps."""
    warmup = warmup_steps(recipe.warmup, steps)
    return LambdaLR(optimizer, factor(recipe.schedule, warmup, steps, recipe.final_lr))


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """The parameters in two groups: matrices, which decay, and biases, norms and the like.

    Args:
        model: Split or not; the shape of a split parameter is that of the whole.
        weight_decay: Of the first group.

    Returns:
        Groups for an optimizer; an empty one is left out.
    """
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and not name.endswith("bias")
            (decaying if is_matrix else others).append(parameter)
    found = [(decaying, weight_decay), (others, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in found if params]


def optimizer(model: nn.Module, recipe: Optimizer) -> torch.optim.AdamW:
    """Torch's AdamW for a model, split or not."""
    return torch.optim.AdamW(
        groups(model, recipe.weight_decay), lr=recipe.lr, betas=recipe.betas, eps=recipe.eps
    )


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the groups of an optimizer are set to, without their parameters."""
    return [{k: x for k, x in group.items() if k != "params"} for group in optimizer.param_groups]


def restore(
    optimizer: torch.optim.Optimizer, scheduler: Any, settings: list[dict[str, Any]]
) -> None:
    """Give a resumed run the settings of its own recipe, at the step of the checkpoint.

    A checkpoint brings the learning rate, decay and so on of the run that wrote it.

    Args:
        optimizer: As it was loaded.
        scheduler: Its scheduler, as it was loaded.
        settings: From `settings_of`, before the checkpoint was loaded.
    """
    scheduler.base_lrs[:] = [group["initial_lr"] for group in settings]
    for group, own, rate in zip(
        optimizer.param_groups, settings, scheduler.lr_lambdas, strict=True
    ):
        group.update(own)
        group["lr"] = own["initial_lr"] * rate(scheduler.last_epoch)
