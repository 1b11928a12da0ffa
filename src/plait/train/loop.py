"""The training loop of `plait train`, which is also an example of one: begin with `steps`."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from plait.checkpoint import latest
from plait.errors import CheckpointError, PlaitError, WeightsError
from plait.loss import last_count
from plait.loss.reduction import TOKENS
from plait.state import state_of
from plait.train import plots, schedules
from plait.train.loop_report import Meter, Report, evaluation_words, perplexity
from plait.train.loop_setup import Setup, set_up
from plait.train.loop_stop import Stop
from plait.train.packing import num_labels
from plait.train.plots import Line
from plait.train.recipe import RECIPE, Recipe

CHECKPOINTS = "checkpoints"
LOG = "log"


@dataclass
class Result:
    """How a run has ended.

    Attributes:
        step: Optimizer steps done, those before a resumption included.
        total_steps: Those that were to be done.
        last: The last line of the log.
        evaluation: The last evaluation, if there was one.
        checkpoint: Where an interrupted run goes on from.
    """

    step: int
    total_steps: int
    last: Line | None = None
    evaluation: Line | None = None
    checkpoint: Path | None = None

    @property
    def finished(self) -> bool:
        """Whether all steps were done."""
        return self.step >= self.total_steps


def train(recipe: Recipe, resume: str | None = None) -> Result:
    """Fine-tune a model as a recipe says; every rank calls it.

    Args:
        recipe: Everything about the run.
        resume: "latest", or a checkpoint, to go on from; in any layout.

    Returns:
        How it ended. The model, its tokenizer and the log are in the recipe's output directory.

    Raises:
        PlaitError: Of any kind, on all ranks.

    Comm:
        In each step that of the model's forward and backward, of the gradient norm, and one control
        message on each axis.
    """
    setup = set_up(recipe)
    accelerator = setup.accelerator
    result = Result(0, setup.total_steps)
    if resume is not None:
        result.step = _resume(setup, resume)
    _open(setup)
    shown = accelerator.is_main_process
    with Stop(shown) as stop, Report(setup.total_steps, result.step, shown) as report:
        try:
            steps(setup, result, stop, report)
        except KeyboardInterrupt:
            last = latest(setup.output / CHECKPOINTS)
            report.say(f"interrupted; the last checkpoint is {last}" if last else "interrupted")
            raise
    if result.finished:
        _finish(setup)
    accelerator.end_training()
    if recipe.reports.plots and shown:
        plots.draw(plots.read(setup.output / LOG / "metrics.jsonl"), setup.output)
    return result


def steps(setup: Setup, result: Result, stop: Stop, report: Report) -> None:
    """The steps of a run, until all are done or somebody wants it to stop.

    Args:
        setup: What `set_up` made.
        result: Where the run stands; kept up to date.
        stop: Whether somebody wants it to stop.
        report: Shows the steps.

    Comm: as `train`.
    """
    accelerator, model, optimizer = setup.accelerator, setup.model, setup.optimizer
    clip_norm = setup.recipe.optimizer.clip_norm or float("inf")
    meter = Meter()

    def is_over() -> bool:
        return result.finished or stop.asked

    model.train()
    while not is_over():
        for batch in setup.loader:  # one epoch; the first from where a checkpoint has left it
            with accelerator.accumulate(model):
                loss, count = loss_of(model, batch)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), clip_norm)
                rate = optimizer.param_groups[0]["lr"]
                optimizer.step()
                setup.scheduler.step()
                optimizer.zero_grad()
            meter.batch(count, num_tokens(setup, batch))
            if accelerator.sync_gradients:
                result.step += 1
                meter.step(accelerator.window_loss(), rate, norm)
                _after_step(setup, result, stop, report, meter)
                if is_over():
                    break


def loss_of(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """The mean loss over the learned tokens of all data ranks, and how many they are.

    Raises:
        PlaitError: The model's own loss is not a mean over tokens that plait knows.

    Comm: that of the model's forward.
    """
    loss: torch.Tensor = model(**batch, use_cache=False).loss
    if state_of(model) is None:  # one process, whose loss knows nothing
        loss.__dict__[TOKENS] = num_labels(batch)
    count = loss.__dict__.get(TOKENS, last_count(model))
    if count is None:
        raise PlaitError(
            f"Training {type(model).__name__} on several ranks:",
            "its loss is none of the cross entropies that plait sums over ranks by tokens",
            "train it in one process",
        )
    return loss, count


@torch.no_grad()
def evaluate(setup: Setup, loader: Any) -> Line:
    """The loss over all rows that are kept for it, each token once.

    Comm: that of the forwards.
    """
    model = setup.model.eval()
    total, labels = 0.0, 0.0
    for batch in loader:
        loss, count = loss_of(model, batch)
        total += float(loss) * float(count) if count else 0.0
        labels += float(count)
    model.train()
    mean = total / max(1.0, labels)
    return {"eval_loss": mean, "perplexity": perplexity(mean), "eval_labels": int(labels)}


def num_tokens(setup: Setup, batch: dict[str, Any]) -> int:
    """Tokens of a batch of all data ranks; of rows that are not packed, about as many."""
    return setup.loader.turn.num_samples * int(batch["input_ids"].shape[1])


def _after_step(setup: Setup, result: Result, stop: Stop, report: Report, meter: Meter) -> None:
    """Log, evaluate, save: what is due after an optimizer step."""
    accelerator, reports = setup.accelerator, setup.recipe.reports

    def is_due(every: int) -> bool:
        return bool(every and result.step % every == 0)

    told = accelerator.places.exchange((stop.asked, _peak_memory_gb(setup)))
    stop.asked = any(asked for asked, _ in told)
    line = None
    if is_due(reports.log_every) or result.finished:
        line = {**meter.take(), "epoch": _epochs(setup), "memory_gb": max(gb for _, gb in told)}
        accelerator.log(line, step=result.step)
        result.last = line
    report.step(result.step, line)
    if setup.eval_loader is not None and (is_due(reports.eval_every) or result.finished):
        result.evaluation = evaluate(setup, setup.eval_loader)
        accelerator.log(result.evaluation, step=result.step)
        report.say(f"step {result.step}: {evaluation_words(result.evaluation)}")
        meter.restart_clock()
    if stop.asked or (is_due(reports.save_every) and not result.finished):
        result.checkpoint = _save(setup, result.step)
        meter.restart_clock()


def _open(setup: Setup) -> None:
    """Write the recipe, and open the log."""
    if setup.accelerator.is_main_process:
        setup.output.mkdir(parents=True, exist_ok=True)
        (setup.output / RECIPE).write_text(setup.recipe.to_yaml(), encoding="utf-8")
    setup.accelerator.init_trackers(LOG, {"recipe": setup.recipe.to_dict(), "data": setup.data})


def _save(setup: Setup, step: int) -> Path:
    return Path(
        setup.accelerator.save_state(
            setup.output / CHECKPOINTS,
            step=step,
            extra={"position": _position(setup)},
            tokenizer=setup.tokenizer,
        )
    )


def _resume(setup: Setup, resume: str) -> int:
    """Load a checkpoint; its step.

    Raises:
        CheckpointError: There is none, it is damaged, it was in the midst of other data, or of
            other adapters.
    """
    settings = schedules.settings_of(setup.optimizer)
    source = setup.output / CHECKPOINTS if resume == "latest" else Path(resume)
    loaded = setup.accelerator.load_state(source)
    schedules.restore(setup.optimizer, setup.scheduler, settings)
    before, now = loaded.extra.get("position", {}), _position(setup)
    changed = [
        f"{key}: {before.get(key)} then, {now[key]} now"
        for key in now
        if before.get(key) != now[key]
    ]
    if changed:
        raise CheckpointError(
            f"To go on from {loaded.path}:",
            ["it has no meaning in other data, or for other adapters", *changed],
            (
                "set these as they were",
                "start anew from the trained model: another --output, with the checkpoint's model",
            ),
        )
    return int(loaded.step)


def _position(setup: Setup) -> dict[str, Any]:
    """What the place in the data depends on."""
    recipe = setup.recipe.to_dict()
    data, lora = recipe["data"], recipe["lora"]
    adapters = {f"lora.{key}": value for key, value in lora.items()} if lora["r"] else {}
    return {
        **adapters,
        **{f"data.{key}": data[key] for key in ("eval", "seq_length", "packing", "shuffle")},
        "train.seed": setup.recipe.train.seed,
        "rows": setup.data["rows"],
        "tokens": setup.data["tokens"],
    }


def _finish(setup: Setup) -> None:
    """Write the model and its tokenizer, as ordinary files of transformers; adapters as PEFT's.

    Raises:
        CheckpointError: The disk does not take them.
    """
    try:
        setup.accelerator.save_model(setup.model, setup.output)
    except (OSError, SafetensorError, WeightsError) as error:
        raise CheckpointError(
            f"Saving the trained model into {setup.output}:",
            str(error),
            [
                "make room, and go on from the last checkpoint: --resume latest",
                "--set reports.save_every=100 keeps checkpoints on the way",
            ],
        ) from error
    if setup.accelerator.is_main_process:
        setup.tokenizer.save_pretrained(setup.output)


def _epochs(setup: Setup) -> float:
    """Passes over the data so far."""
    place = setup.loader.state_dict()
    return round(place["epoch"] + place["samples"] / setup.data["rows"], 4)


def _peak_memory_gb(setup: Setup) -> float:
    """The highest memory of this rank so far: of its CUDA device, else of the process."""
    device = setup.accelerator.device
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e9, 3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round((peak if sys.platform == "darwin" else peak * 1024) / 1e9, 3)
