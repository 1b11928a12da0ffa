"""What a run needs before its first step: data, model, optimizer, all of them checked."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from plait.auto import AutoModelForCausalLM
from plait.errors import PlaitError
from plait.hf.generation.text import load_tokenizer
from plait.layout import DistributedConfig
from plait.run import progress
from plait.train import schedules, text_data
from plait.train.accelerator import Accelerator
from plait.train.loader import DataRankLoader, data_loader
from plait.train.packing import Collate, Rows
from plait.train.recipe import Recipe
from plait.train.settings import ProjectConfiguration


@dataclass
class Setup:
    """Everything of a run that was made ready.

    Attributes:
        recipe: What was asked for.
        accelerator: The layout.
        model: The model, split over it.
        tokenizer: The model's.
        optimizer: AdamW.
        scheduler: Of its learning rate.
        loader: Batches to learn from.
        eval_loader: Batches to evaluate on, or None.
        total_steps: Optimizer steps of the whole run.
        data: What is learned from, in words and numbers.
    """

    recipe: Recipe
    accelerator: Accelerator
    model: Any
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loader: DataRankLoader
    eval_loader: DataRankLoader | None
    total_steps: int
    data: dict[str, Any]

    @property
    def output(self) -> Path:
        """Where everything goes."""
        return Path(self.recipe.output)


def set_up(recipe: Recipe) -> Setup:
    """Make everything ready, in the order in which it can be refused: layout, data, model.

    Raises:
        PlaitError: Of any kind, from whatever does not fit.

    Comm: that of `Accelerator`, `from_pretrained` and `prepare`. All ranks must call.
    """
    accelerator = Accelerator(
        distributed_config(recipe),
        mixed_precision=_precision(recipe.train.mixed_precision),
        gradient_accumulation_steps=recipe.train.accumulate,
        log_with=["jsonl", *recipe.reports.trackers],
        project_config=ProjectConfiguration(recipe.output, total_limit=recipe.reports.keep),
        seed=recipe.train.seed,
    )
    tokenizer = load_tokenizer(recipe.model)
    with accelerator.local_main_process_first():  # the others find the tokens in the cache
        rows, eval_rows = rows_of(recipe, tokenizer)
    loader = _loader(recipe, rows, recipe.data.shuffle)
    eval_loader = None
    if eval_rows is not None:  # not the accelerator's: its place is no part of a checkpoint
        plain = _loader(recipe, eval_rows, False)
        eval_loader = data_loader(plain, accelerator.places, device=accelerator.device)

    model = with_lora(_model(recipe), recipe)
    optimizer = schedules.optimizer(model, recipe.optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps_an_epoch = math.ceil(len(loader) / recipe.train.accumulate)
    total = recipe.train.steps or math.ceil(recipe.train.epochs * steps_an_epoch)
    scheduler = schedules.scheduler(optimizer, recipe.optimizer, total)
    if rows.packed:
        check_borders(model)
    return Setup(
        recipe=recipe,
        accelerator=accelerator,
        model=model,
        tokenizer=tokenizer,
        optimizer=optimizer,
        scheduler=accelerator.prepare(scheduler),
        loader=loader,
        eval_loader=eval_loader,
        total_steps=total,
        data={
            "rows": len(rows),
            "tokens": rows.num_tokens,
            "dropped_tokens": rows.dropped_tokens,
            "rows_without_labels": rows.empty_rows,
            "eval_rows": 0 if eval_rows is None else len(eval_rows),
        },
    )


def distributed_config(recipe: Recipe) -> DistributedConfig:
    """The layout of a recipe."""
    layout = recipe.layout
    return DistributedConfig(
        tp_size=layout.tp,
        dp_shard_size=layout.dp_shard,
        dp_replicate_size=layout.dp_replicate,
        tp_plan=layout.tp_plan,
        enable_sequence_parallel=layout.sequence_parallel,
        fsdp_cpu_offload=layout.cpu_offload,
    )


def rows_of(recipe: Recipe, tokenizer: Any) -> tuple[Rows, Rows | None]:
    """The rows to learn from, and those to evaluate on.

    Raises:
        PlaitError: The data cannot be used, or there is nothing to learn in it.
    """
    data = recipe.data
    found = text_data.split(data, tokenizer, recipe.train.seed)
    packing = text_data.packing_of(data, found.train)
    pad = _pad_token(tokenizer)
    rows = Rows(found.train, data.seq_length, packing, found.train_order, pad)
    evaluation = None
    if found.evaluation is not None:
        order = found.evaluation_order
        evaluation = Rows(found.evaluation, data.seq_length, packing, order, pad)
    for name, made in (("learn from", rows), ("evaluate on", evaluation)):
        if made is not None and not len(made):
            raise PlaitError(
                f"The data to {name}:",
                f"in no row of {data.seq_length} tokens is there a token to learn",
                ("give more text", "a larger data.seq_length", "data.learn: all"),
            )
    return rows, evaluation


@torch.no_grad()
def check_borders(model: Any) -> None:
    """Show that the model keeps documents that share a row apart; one small forward.

    Two rows that differ in their first document must give the same for the second.

    Raises:
        PlaitError: They don't: tokens see the document before their own.

    Comm: that of one forward.
    """
    first, size = 6, model.config.get_text_config().vocab_size
    ids = torch.arange(4 * first, device=model.device).reshape(2, 2 * first) + 7
    ids[1, first:] = ids[0, first:]
    positions = torch.arange(first, device=model.device).repeat(2, 2)
    was_training = model.training
    logits = model.eval()(ids % size, position_ids=positions, use_cache=False).logits.float()
    model.train(was_training)
    moved = (logits[0] - logits[1]).abs()
    own, other = float(moved[:first].max()), float(moved[first:].max())
    if other > 1e-2 * own:
        raise PlaitError(
            f"Rows of several documents for {type(model).__name__}:",
            "it lets tokens see other documents of their row, whatever position_ids say "
            f"(a change of {own:.2g} in one moves the next by {other:.2g})",
            ("data.packing: none", "train.attention: sdpa, if the model has it"),
        )


def _model(recipe: Recipe) -> Any:
    """The model, each rank with its own part, ready to learn."""
    given: dict[str, Any] = {}
    if recipe.train.attention is not None:
        given["attn_implementation"] = recipe.train.attention
    model = AutoModelForCausalLM.from_pretrained(
        recipe.model,
        dtype=getattr(torch, recipe.train.dtype),
        distributed_config=distributed_config(recipe),
        **given,
    )
    if recipe.train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def with_lora(model: Any, recipe: Recipe) -> Any:
    """The model with the adapters that a recipe asks for; without any, the model itself.

    Raises:
        PlaitError: PEFT is not installed, or a layer that gets an adapter is not there.

    Comm: that of `plait.adopt`, on a split model.
    """
    lora = recipe.lora
    if not lora.r:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise PlaitError("lora.r:", "peft is not installed", "pip install 'plait[peft]'") from None
    targets: Any = list(lora.targets)
    config = LoraConfig(
        r=lora.r,
        lora_alpha=2 * lora.r if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    try:
        around = get_peft_model(model, config)
    except ValueError as error:
        if isinstance(error, PlaitError):
            raise
        raise PlaitError(
            f"Adapters of {type(model).__name__}:",
            " ".join(str(error).split()),
            ["lora.targets: all-linear", "names that model.named_modules() shows, or their ends"],
        ) from error
    trained, total = around.get_nb_trainable_parameters()
    progress.report(
        f"LoRA of rank {lora.r}: {trained:,} of {total:,} parameters are trained "
        f"({100 * trained / total:.2f} %)"
    )
    return around


def _loader(recipe: Recipe, rows: Rows, shuffle: bool) -> "DataLoader[Any]":
    return DataLoader(
        rows,
        batch_size=recipe.train.batch_size,
        shuffle=shuffle,
        collate_fn=Collate(rows.pad_token),
    )


def _pad_token(tokenizer: Any) -> int:
    found = [tokenizer.pad_token_id, tokenizer.eos_token_id, 0]
    return int(next(token for token in found if token is not None))


def _precision(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"
