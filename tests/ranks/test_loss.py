"""Cross entropy over a split vocabulary: value and gradient are torch's on the whole logits."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from plait.comm import count, raw
from plait.errors import PlaitError
from plait.loss import SplitLogits, Vocabulary, cross_entropy, kernel, reduction, vocabulary
from plait.plan.intervals import even
from plait.testing import mutation

OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.3, "z_loss": 1e-3, "ignore_index": 2},
]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made * scale


def labels_for(x: torch.Tensor, ignore: int = -100, seed: int = 1) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, x.shape[-1], x.shape[:-1], generator=made)
    return labels.masked_fill(torch.rand(labels.shape, generator=made) < 0.3, ignore)


def expected(x: torch.Tensor, labels: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """torch's, with the z-loss by hand."""
    options = {"reduction": "mean", "ignore_index": -100, **options}
    z_loss = options.pop("z_loss", 0.0)
    rows, flat = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    loss = F.cross_entropy(rows, flat, **options)
    valid = flat != options["ignore_index"]
    z = (z_loss * rows.logsumexp(-1).square()).masked_fill(~valid, 0)
    if options["reduction"] == "none":
        return (loss + z).view(labels.shape)
    return loss + (z.sum() / valid.sum() if options["reduction"] == "mean" else z.sum())


def line() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def part(x: torch.Tensor, sizes: tuple[int, ...], mesh: Any) -> torch.Tensor:
    rank = mesh.get_local_rank()
    return x.narrow(-1, sum(sizes[:rank]), sizes[rank]).clone()


def check(
    mesh: Any, options: dict[str, Any], vocab: int = 13, scale: float = 1.0, seed: int = 0
) -> None:
    """The loss and its gradient by slices against those of the whole."""
    x = draw(3, 5, vocab, scale=scale, seed=seed).requires_grad_()
    labels = labels_for(x, options.get("ignore_index", -100), seed=seed + 1)
    sizes = even((vocab,), 0, mesh.size()).sizes
    whole = expected(x, labels, dict(options))
    weights = draw(*whole.shape, seed=3)
    (whole * weights).sum().backward()
    local = part(x.detach(), sizes, mesh).requires_grad_()
    for logits, axis in ((local, mesh), (SplitLogits.of(local, Vocabulary(sizes, mesh)), None)):
        local.grad = None
        loss = cross_entropy(logits, labels, mesh=axis, **options)
        assert loss.dtype == x.dtype and loss.shape == whole.shape
        torch.testing.assert_close(loss, whole, rtol=1e-12, atol=1e-12)
        (loss * weights).sum().backward()
        grad = part(x.grad, sizes, mesh)
        assert local.grad is not None
        torch.testing.assert_close(local.grad, grad, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_torch(options: dict[str, Any]) -> None:
    mesh = line()
    for mode, vocab in itertools.product(("mean", "sum", "none"), (12, 13)):
        check(mesh, {**options, "reduction": mode}, vocab)
    check(mesh, options, vocab=2 if mesh.size() == 2 else 3)  # a rank may hold nothing
    check(mesh, options, scale=1000.0)


@pytest.mark.ranks(2)
def test_a_rank_without_an_entry_and_more_rows_than_a_chunk() -> None:
    mesh = line()
    check(mesh, {"label_smoothing": 0.1}, vocab=1)
    with mutation.patched(kernel, "CHUNK", 8):
        for options in OPTIONS:
            check(mesh, options)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axis", [0, 1])
def test_two_groups_with_different_logits(axis: int) -> None:
    names = ("tp", "other") if axis == 0 else ("other", "tp")
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    for options in OPTIONS:
        check(grid["tp"], options, seed=grid["other"].get_local_rank())


@pytest.mark.ranks(2, 3)
def test_mutations_are_noticed() -> None:
    mesh = line()

    def without(op: str) -> Any:
        return lambda self, x, kind="sum": x if kind == op else raw.all_reduce(x, mesh, kind)

    check(mesh, {}, scale=1000.0)
    with mutation.must_fail(vocabulary.Vocabulary, "reduce", without("max")):
        check(mesh, {}, scale=1000.0)
    with mutation.must_fail(vocabulary.Vocabulary, "reduce", without("sum")):
        check(mesh, {})
    with mutation.must_fail(vocabulary.Vocabulary, "start", 0):
        check(mesh, {})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["mean", "sum", "none"])
def test_all_labels_ignored(mode: str) -> None:
    mesh = line()
    x = draw(4, 6).requires_grad_()
    local = part(x.detach(), (3, 3), mesh).requires_grad_()
    labels = torch.full((4,), -100)
    loss = cross_entropy(local, labels, mesh=mesh, reduction=mode)
    torch.testing.assert_close(
        loss, F.cross_entropy(x, labels, reduction=mode), equal_nan=True, rtol=0, atol=0
    )
    loss.sum().backward()
    assert local.grad is not None and not local.grad.any()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    mesh = line()
    x = draw(7, 64, scale=4.0).to(dtype)
    labels = labels_for(x)
    local = part(x, (32, 32), mesh).requires_grad_()
    x.requires_grad_()
    loss, whole = cross_entropy(local, labels, mesh=mesh), F.cross_entropy(x.float(), labels)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, whole.to(dtype))
    loss.backward()
    whole.backward()
    assert local.grad is not None and local.grad.dtype == dtype
    torch.testing.assert_close(local.grad, part(x.grad, (32, 32), mesh))
    with torch.autocast("cpu", torch.bfloat16):
        assert cross_entropy(local, labels, mesh=mesh).dtype == torch.float32


@pytest.mark.ranks(2, 4)
def test_collectives() -> None:
    mesh = line()
    local = draw(6, 5, seed=mesh.get_local_rank()).requires_grad_()
    labels = torch.randint(0, 5 * mesh.size(), (6,), generator=torch.Generator().manual_seed(0))
    for options, numbers in (({}, 2), ({"label_smoothing": 0.1}, 3)):
        with count() as seen:
            cross_entropy(local, labels, mesh=mesh, **options).backward()
        assert seen == {"all_reduce": 2} and seen.backward == {}
        assert seen.bytes["all_reduce"] == 6 * 8 * (1 + numbers)


class Largest(TorchDispatchMode):
    """The largest tensor that any operator makes, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            # The link between ranks shows its memory as integers.
            if isinstance(x, torch.Tensor) and x.is_floating_point() and type(x) is not SplitLogits:
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.ranks(2)
def test_no_rank_makes_a_tensor_of_the_whole_vocabulary() -> None:
    mesh = line()
    tokens, vocab = 64, 1 << 15
    local = torch.randn(tokens, vocab // 2, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(0))

    def largest(logits: torch.Tensor) -> int:
        with Largest() as seen:
            F.cross_entropy(logits.float().view(-1, vocab), labels).backward()
        return seen.elements

    split = SplitLogits.of(local, Vocabulary((vocab // 2, vocab // 2), mesh))
    assert largest(split) == tokens * vocab // 2, "the slice and its gradient"
    assert largest(split.whole()) >= tokens * vocab, "the check sees a whole"


@pytest.mark.ranks(2)
def test_bad_input_is_refused_before_anything_is_communicated() -> None:
    mesh = line()
    local, labels = torch.randn(4, 5), torch.tensor([0, 9, -100, 10])
    with count() as seen:
        for bad, wrong in (
            ({}, "labels from 0 to 10 for a vocabulary of 10"),
            ({"reduction": "average"}, "reduction='average'"),
            ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
            ({"labels": labels[:3]}, "one number for each row"),
            ({"labels": torch.rand(4)}, "not integers"),
        ):
            with pytest.raises(PlaitError, match=wrong):
                cross_entropy(local, **{"labels": labels, "mesh": mesh, **bad})
        with pytest.raises(PlaitError, match="labels from -7"):
            cross_entropy(local, torch.tensor([-7, 0, 0, 0]), mesh=mesh)
    assert seen == {}


def data_parallel(grid: Any, tokens: list[int], mode: str, scale: float | None = None) -> None:
    """Means over data ranks with unequal numbers of tokens, against one process."""
    data, tp = grid["data"], grid["tp"]
    vocab, sizes = 7, even((7,), 0, tp.size()).sizes
    xs = [draw(n, vocab, seed=n).requires_grad_() for n in tokens]
    labels = [labels_for(x, seed=number) for number, x in enumerate(xs)]
    if tokens[-1] > 1:
        labels[-1][:] = -100  # a rank without a token that counts
    whole = F.cross_entropy(torch.cat(xs), torch.cat(labels), reduction=mode)
    whole.backward()
    mine = data.get_local_rank()
    local = part(xs[mine].detach(), sizes, tp).requires_grad_()
    loss = cross_entropy(local, labels[mine], mesh=tp, data_mesh=data, reduction=mode)
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=1e-12)
    assert loss.__dict__["_plait_tokens"] == sum(int((x >= 0).sum()) for x in labels)
    loss.backward()
    assert local.grad is not None and xs[mine].grad is not None
    # Gradients are averaged over data ranks afterwards.
    mean = local.grad / data.size()
    torch.testing.assert_close(mean, part(xs[mine].grad, sizes, tp), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2, 3, 4)
def test_data_ranks_with_unequal_batches() -> None:
    size = dist.get_world_size()
    shapes = [(size, 1)] + [(2, 2)] * (size == 4)
    for shape in shapes:
        grid = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tp"))
        for mode in ("mean", "sum"):
            data_parallel(grid, [2 * n + 1 for n in range(shape[0])], mode)
            data_parallel(grid, [1] * shape[0], mode)
        with mutation.must_fail(
            reduction._OfAllRanks,
            "apply",
            lambda total, of_all, n: total + (of_all - total).detach(),
        ):
            data_parallel(grid, [2 * n + 1 for n in range(shape[0])], "mean")


@pytest.mark.ranks(2)
def test_no_token_counts_on_any_data_rank() -> None:
    mesh = line()
    x = draw(3, 5).requires_grad_()
    loss = cross_entropy(x, torch.full((3,), -100), data_mesh=mesh)
    assert loss.isnan()
    loss.backward()
    assert x.grad is not None and not x.grad.any()


@pytest.mark.ranks(2)
def test_a_bad_label_on_one_data_rank_is_an_error_on_all() -> None:
    mesh = line()
    bad = 99 if mesh.get_local_rank() else 1
    with pytest.raises(PlaitError, match=r"labels from|99"):
        cross_entropy(draw(1, 5), torch.tensor([bad]), data_mesh=mesh)


def test_names() -> None:
    assert plait.loss.cross_entropy is cross_entropy
