"""One case of the sweep, as every rank runs it: the split model against the whole one."""

import contextlib
import copy
import inspect
import os
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import plait
from plait.errors import PlaitError
from plait.hf.small import example_batch, small_config, small_model
from plait.proof import numbers
from tests.sweep.catalogue import Case, config_of

NEW_TOKENS = 8
NOT_TEXT = {"flattened_patches", "input_features", "input_values", "pixel_values"}


@dataclass
class Result:
    """What one rank found."""

    name: str
    shape: str
    size: int
    status: str = "pass"  # pass, wrong, refused, crash, cannot-build, hung
    detail: str = ""
    plan: str = ""
    class_name: str = ""
    heads: str = ""
    held: float = 0.0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    parameters: int = 0


@dataclass
class Whole:
    """The whole model, and what it answers."""

    key: str
    model: Any = None
    batch: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] | None = None
    tokens: torch.Tensor | None = None
    notes: list[str] = field(default_factory=list)
    problem: str = ""
    exact: bool = True  # whether its float32 parts can run in float64

    def precision(self) -> contextlib.AbstractContextManager[None]:
        return numbers.exact() if self.exact else contextlib.nullcontext()

    @property
    def floor(self) -> float:
        """What a gradient's scale is at least, as a fraction of the largest."""
        return numbers.FLOOR if self.exact else 1e-2

    @property
    def tolerance(self) -> float:
        return numbers.TOLERANCES[torch.float64 if self.exact else torch.float32]


SEEDS = (0, 1, 2)
"""Weights to try, until rounding errors do not move the whole model."""

_LAST: list[Whole] = []
"""The last whole model, which the next sizes of the same shape ask for again."""


def run_case(case: Case) -> dict[str, Any]:
    """Run one case on every rank of the default group; the result as plain data."""
    started = time.perf_counter()
    warnings.simplefilter("ignore")
    result = Result(case.model.name, case.shape, case.size, class_name=case.model.class_name)
    result.heads = "/".join(map(str, case.heads))
    whole = whole_of(case)
    result.notes = list(whole.notes)
    if whole.problem:
        result.status, result.detail = "cannot-build", whole.problem
    else:
        result.plan = "shipped" if ships_plan(whole.model) else "derived"
        result.parameters = sum(p.numel() for p in whole.model.parameters())
        try:
            _compare(case, whole, result)
        except PlaitError as error:
            result.status, result.detail = "refused", " ".join(str(error).split())
    result.seconds = time.perf_counter() - started
    return asdict(result)


def whole_of(case: Case) -> Whole:
    """The whole model of a case with its answers; the last one is kept."""
    key = f"{case.model.name} {case.heads} {case.width}"
    if not _LAST or _LAST[0].key != key:
        _LAST.clear()
        _LAST.append(_build(case, Whole(key)))
    return _LAST[0]


def _build(case: Case, whole: Whole) -> Whole:
    import transformers

    transformers.logging.set_verbosity(50)
    try:
        heads, kv_heads = case.heads
        config = small_config(
            config_of(case.model), heads=heads, kv_heads=kv_heads, intermediate=case.width
        )
        for seed in SEEDS:
            kind = getattr(transformers, case.model.class_name)
            whole.model = small_model(kind, config, seed=seed)
            whole.batch = example_batch(whole.model)
            _quiet_generation(whole.model)
            _first_forward(whole)
            moved = _moved_by_rounding(whole)
            if moved <= whole.tolerance:
                break
            whole.notes.append(f"seed {seed}: rounding errors move the whole model by {moved:.0e}")
    except Exception as error:
        whole.problem = where(error)
        return whole
    takes = inspect.signature(whole.model.forward).parameters.keys() & NOT_TEXT
    if takes and not takes & whole.batch.keys():
        whole.notes.append("run on text alone")
    try:
        whole.outputs = _forward_backward(whole, whole.model)
        whole.grads = {n: p.grad for n, p in whole.model.named_parameters() if p.grad is not None}
    except Exception as error:
        whole.notes.append(f"no backward in one process: {where(error)}")
    try:
        if "diffusion" in type(whole.model).__name__.lower():
            raise NotImplementedError("it generates from random numbers")
        whole.tokens = generated(whole, whole.model)
    except Exception as error:
        whole.notes.append(f"no generate in one process: {where(error)}")
    whole.model.zero_grad(set_to_none=True)
    if any(not torch.isfinite(x).all() for x in whole.outputs.values()):
        whole.problem = "its output is not finite"
    return whole


def _moved_by_rounding(whole: Whole) -> float:
    """How far the whole model's answer moves when what its norms give changes in the last bits.

    A choice of the largest k scores can hang on a tie; then no two computations agree.
    """
    norms = [m for m in whole.model.modules() if "Norm" in type(m).__name__]
    eps = 4 * torch.finfo(torch.float64 if whole.exact else torch.float32).eps
    with whole.precision(), torch.no_grad():
        before = answers(whole.model, whole.batch)["logits"]
        handles = [norm.register_forward_hook(_nudged(eps)) for norm in norms]
        after = answers(whole.model, whole.batch)["logits"]
    for handle in handles:
        handle.remove()
    return numbers.difference(after, before)


def _nudged(eps: float) -> Any:
    """A forward hook that changes a tensor by a fraction `eps` and less, up and down."""

    def hook(module: Any, args: Any, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return (
            x * (1 + eps * torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos()) + eps * eps
        )

    return hook


def _quiet_generation(model: Any) -> None:
    """Generate until the limit, without words about padding."""
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.forced_eos_token_id = None
        model.generation_config.pad_token_id = model.generation_config.pad_token_id or 0
        model.generation_config.num_beams = 1


def _compare(case: Case, whole: Whole, result: Result) -> None:
    split = copy.deepcopy(whole.model)
    plait.parallelize(split, plait.DistributedConfig(tp_size=case.size), check=False)
    result.held = float(plait.held_fraction(split))
    outputs = _forward_backward(whole, split, backward=whole.grads is not None)
    problems = list(_different(outputs, whole.outputs, whole.tolerance))
    if whole.grads is not None:
        grads = dict(plait.full_grads(split))
        top = max((float(g.abs().max()) for g in whole.grads.values()), default=0.0)
        found = _different(grads, whole.grads, whole.tolerance, top * whole.floor)
        problems += [f"grad {line}" for line in found]
    if whole.tokens is not None:
        tokens = generated(whole, split)
        if not torch.equal(tokens, whole.tokens):
            problems.append("tokens")
    if problems:
        result.status = "wrong"
        result.detail = problems[0] + (f" and {len(problems) - 1} more" if problems[1:] else "")


def _different(
    split: dict[str, torch.Tensor],
    whole: dict[str, torch.Tensor],
    limit: float,
    floor: float = 0.0,
) -> list[str]:
    lines = []
    for name in sorted(whole, key=lambda n: n != "logits"):
        if name not in split:
            if bool(whole[name].any()):
                lines.append(f"{name} is missing")
            continue
        gap = numbers.difference(split[name], whole[name], floor)
        if not gap <= limit:
            lines.append(f"{name} off by {gap:.1e}")
    return lines


def _first_forward(whole: Whole) -> None:
    """Whether it runs at all: in float64, else with float32 parts, else in float32."""
    model = whole.model
    attempts = (("", True), ("its float32 parts", False), ("all of it", False))
    for what, exact in attempts:
        whole.exact = exact
        if what == "all of it":
            model.float()
            floats = {k: v.float() for k, v in whole.batch.items() if v.is_floating_point()}
            whole.batch |= floats
        try:
            with whole.precision(), torch.no_grad():
                whole.outputs = answers(model, whole.batch)
        except (RuntimeError, TypeError, ValueError):
            if what == "all of it":
                raise
        else:
            if what:
                whole.notes.append(f"{what} in float32: compared within 2e-5")
            return


def _forward_backward(whole: Whole, model: Any, backward: bool = True) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(backward), whole.precision():
        outputs = answers(model, whole.batch)
        if backward:
            loss = outputs.get("loss")
            (numbers.weighted(outputs["logits"]) if loss is None else loss).backward()
    return {name: x.detach() for name, x in outputs.items()}


def answers(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a model's output that are worth comparing."""
    torch.manual_seed(0)
    found = dict(numbers.tensors(model(**{k: v.clone() for k, v in batch.items()})))
    kept = {n: x for n, x in found.items() if n in ("logits", "loss", "aux_loss")}
    kept = kept or {n: x for n, x in found.items() if x.is_floating_point()}
    if "logits" not in kept:
        kept["logits"] = next(iter(kept.values()))
    return kept


def generated(whole: Whole, model: Any) -> torch.Tensor:
    """Greedy tokens."""
    skipped = ("labels", "decoder_input_ids")
    inputs = {k: v.clone() for k, v in whole.batch.items() if k not in skipped}
    torch.manual_seed(0)
    with whole.precision(), torch.no_grad():
        made = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    made = made if isinstance(made, torch.Tensor) else made[0]
    return made.detach().clone()


def ships_plan(model: Any) -> bool:
    """Whether transformers ships tensor-parallel rules with the model or a part of it."""
    for part in model.modules():
        config = getattr(part, "config", None)
        if getattr(part, "_tp_plan", None) or getattr(config, "base_model_tp_plan", None):
            return True
    return False


def where(error: BaseException) -> str:
    """Type, first line and place of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if "/transformers/" in f.filename or "/plait/" in f.filename]
    inside = [
        f for f in inside if not f.filename.endswith(("testing/parity.py", "proof/numbers.py"))
    ]
    place = (inside or frames)[-1]
    lines = str(error).strip().splitlines() or [""]
    file = os.sep.join(place.filename.split(os.sep)[-2:])
    return f"{type(error).__name__}: {lines[0][:160]} ({file}:{place.lineno})"
