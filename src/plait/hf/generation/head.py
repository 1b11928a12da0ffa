"""The border of a split `lm_head` during `generate`: candidates instead of the whole vocabulary.

A `colwise_gather_output` head all-gathers `[batch, 1, vocab]` each step, of which greedy decoding
uses one number per row and top-k sampling k. Where the rest provably cannot matter, ranks exchange
their best entries only and every other logit reads -inf; the tokens are bit for bit the same:

- greedy, no processor: the global argmax is one of the local ones. Equal values go to the lowest
  id, as `argmax` does, because candidates are written back at their place in the vocabulary.
- sampling through top-k (after a temperature or nothing): the k best are among the local k best,
  and everything else is masked to -inf by top-k itself, so the tensor that reaches `multinomial`
  is the same. Entries equal to the k-th value survive top-k too, however many: each rank also
  sends its (k+1)-th value, and if that one is not below the global k-th value, an entry could have
  been cut off and this step gathers everything. All ranks see the same numbers and decide alike.

Whether a model hands the head's output on unchanged (and not, say, through a tanh, which would
turn -inf into a number) is not looked up but observed: the first step of every call gathers
everything and compares.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait import comm
from plait.errors import LayoutError
from plait.hf.generation.messages import exchange

_CANDIDATE_BYTES = 16  # a float64 value and its id, also as a float64 (exact below 2**53)


@dataclass(frozen=True)
class Selection:
    """Which logits decide the next token.

    Attributes:
        num_best: How many of the best entries are enough.
        before: The processors between the logits and the selection, elementwise and monotonic.
        ties_kept: Entries equal to the last selected value are selected too (top-k), so a cut
            through equal values must be noticed. Greedy decoding takes the lowest id instead.
    """

    num_best: int
    before: tuple[Callable[..., Tensor], ...] = ()
    ties_kept: bool = False


def selection_of(processors: Sequence[Any], do_sample: bool) -> Selection | None:
    """What the prepared logits processors need of the vocabulary.

    Args:
        processors: transformers' list in the order of application.
        do_sample: Sampling (true) or the best token (false).

    Returns:
        The selection, or `None` where whole logits are needed.
    """
    kinds = [_builtin_name(processor) for processor in processors]
    if not do_sample:
        return Selection(num_best=1) if not kinds else None
    start = 1 if kinds[:1] == ["TemperatureLogitsWarper"] else 0
    if kinds[start : start + 1] != ["TopKLogitsWarper"]:
        return None
    # What follows top-k sees the very tensor it would see after the full gather.
    return Selection(int(processors[start].top_k), tuple(processors[:start]), ties_kept=True)


def _builtin_name(processor: Any) -> str:
    kind = type(processor)
    return kind.__name__ if kind.__module__.startswith("transformers.") else ""


class HeadExchange:
    """Makes full-width logits of the local ones, for the length of one `generate` call.

    The border of a split head calls this object, found as `lm_head._plait_output`, instead of
    gathering by itself.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.selection: Selection | None = None
        self.unchanged = False
        self.num_gathers = 0
        self.num_exchanges = 0
        self._sizes: list[int] | None = None
        self._seen: weakref.ref[Tensor] | None = None
        self._seen_last: Tensor | None = None
        self._holds_candidates = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadExchange":
        return HeadExchange(self.mesh)

    def __call__(self, local_logits: Tensor) -> Tensor:
        """Full-width logits: complete, or the candidates and -inf.

        Args:
            local_logits: `[..., vocab_local]`, this rank's part of the vocabulary; the parts follow
                each other in the order of the ranks.

        Returns:
            `[..., vocab]`, the same on all ranks.

        Comm:
            Forward: one all-gather, of `16 * (k + 1)` bytes a row and rank with candidates or of
            `vocab_local` logits a row and rank without; both after a cut tie. One exchange of the
            widths on the first step. No backward.
        """
        if self._sizes is None:
            self._sizes = exchange("vocabulary sizes", local_logits.shape[-1], self.mesh)
        logits = None
        if self.selection is not None and self.unchanged and self._pays_off(local_logits):
            logits = candidate_logits(local_logits, self.selection, self.mesh, self._sizes)
        self._holds_candidates = logits is not None
        if logits is None:
            logits = comm.all_gather(local_logits, self.mesh, dim=-1, sizes=self._sizes)
            self.num_gathers += 1
        else:
            self.num_exchanges += 1
        self._seen = weakref.ref(logits)
        watched = self.selection is not None and not self.unchanged
        self._seen_last = logits[..., -1, :].clone() if watched else None
        return logits

    def _pays_off(self, local_logits: Tensor) -> bool:
        assert self.selection is not None and self._sizes is not None
        width = self.selection.num_best + (1 if self.selection.ties_kept else 0)
        fewest = min(self._sizes)
        return width <= fewest and width * _CANDIDATE_BYTES < fewest * local_logits.element_size()

    def observe(self, output: Any) -> None:
        """Compares the logits that the model returned with those that left the head.

        Raises:
            LayoutError: The model changed logits of which only candidates were exchanged. It did
                not on the first step, so this is a model whose steps differ.
        """
        returned: Any = getattr(output, "logits", None)
        same = returned is not None and self._seen is not None and returned is self._seen()
        if self._holds_candidates and not same:
            raise LayoutError(
                "generate() exchanged only the best candidates of a split vocabulary.",
                "the model returned other logits than its lm_head on a later step",
                "ask for whole logits: generate(..., output_logits=True, "
                "return_dict_in_generate=True)",
            )
        if self._seen_last is not None:
            # The same object might have been changed in place (`logits *= scale`).
            self.unchanged = bool(same and torch.equal(returned[..., -1, :], self._seen_last))
            self._seen_last = None


def candidate_logits(
    local_logits: Tensor, selection: Selection, mesh: DeviceMesh, sizes: Sequence[int]
) -> Tensor | None:
    """Exchanges the best local entries and scatters them into -inf.

    Args:
        local_logits: `[..., vocab_local]` with at least as many columns as candidates.
        selection: What decides the next token.
        mesh: The 1-D mesh over which the vocabulary is split.
        sizes: The width of every rank's part.

    Returns:
        `[..., vocab]`, or `None` where a tie was cut (on all ranks alike).

    Comm:
        One all-gather of `[2, ..., k (+ 1)]` float64. No backward.
    """
    num_best = selection.num_best
    offset = sum(sizes[: mesh.get_local_rank()])
    if selection.ties_kept:
        values, ids = local_logits.topk(num_best + 1, dim=-1)
    else:
        # Compared as transformers does, in float32: two float64 logits may become equal there, and
        # then the lowest id wins. `max` gives the lowest id of equal values, like `argmax`.
        keys = local_logits.float() if local_logits.dtype == torch.float64 else local_logits
        ids = keys.max(dim=-1, keepdim=True).indices
        values = local_logits.gather(-1, ids)
    packed = torch.stack((values.double(), (ids + offset).double()))
    gathered = comm.all_gather(packed.unsqueeze(0), mesh, dim=0)  # [ranks, 2, ..., k (+ 1)]
    values = gathered[:, 0].movedim(0, -2).to(local_logits.dtype)  # [..., ranks, k (+ 1)]
    ids = gathered[:, 1].movedim(0, -2).long()
    if selection.ties_kept and _cuts_a_tie(values, selection):
        return None
    values, ids = values[..., :num_best].flatten(-2), ids[..., :num_best].flatten(-2)
    logits = local_logits.new_full((*local_logits.shape[:-1], sum(sizes)), float("-inf"))
    return logits.scatter_(-1, ids, values)


def _cuts_a_tie(values: Tensor, selection: Selection) -> bool:
    """Could an entry that a rank did not send survive top-k? `values`: `[..., ranks, k + 1]`.

    Asked of the values as top-k will see them: a division may make different logits equal. NaN
    compares as a cut tie.
    """
    scores = values.float()
    for processor in selection.before:
        scores = processor(None, scores)
    sent, next_best = scores[..., :-1], scores[..., -1:]
    last_kept = sent.flatten(-2).topk(selection.num_best, dim=-1).values[..., -1, None, None]
    return not bool((next_best < last_kept).all())
