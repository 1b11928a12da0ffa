"""The pytest plugin: `@pytest.mark.ranks(2, 3, 4)` runs a test's body on every rank of a pool.

```python
@pytest.mark.ranks(2, 4, timeout=20)
def test_sum(rank, world_size):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == sum(range(world_size))
```

In the body the default process group is initialised (gloo, `world_size` ranks). Arguments come
from fixtures and `parametrize` as usual, are made once in the pytest process and pickled to every
rank (so `tmp_path` is one directory shared by all). Three are made in each rank itself: `rank`,
`world_size` and `monkeypatch`. Seeds, default dtype and device, grad mode and environment are
reset after every test. The first failing rank stops the test; all ranks' tracebacks are shown.
"""

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from plait.testing.pool import Pool

LOCAL_ARGUMENTS = ("rank", "monkeypatch")
"""Arguments that every rank makes for itself."""

_POOL = pytest.StashKey["Pool"]()
_DEFAULT_TIMEOUT_S = 60.0


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        "ranks(*world_sizes, timeout=60): run the body on every rank of a pool of gloo "
        "processes, once per world size",
    )


@pytest.fixture
def rank() -> int:
    """The rank this body runs on; meaningful under `@pytest.mark.ranks` only."""
    return 0


@pytest.fixture
def world_size() -> int:
    """The number of ranks this body runs on; 1 without `@pytest.mark.ranks`."""
    return 1


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per world size."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    sizes = marker.args or (2,)
    if not all(type(size) is int and size >= 1 for size in sizes):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: ranks{marker.args} must be positive integers"
        )
    if "world_size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world_size")
    metafunc.parametrize("world_size", sizes, ids=[f"{size}ranks" for size in sizes])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order by world size, so that process groups are rebuilt once per size and not per test."""
    sizes = {item: _world_size(item) for item in items}
    items.sort(key=sizes.__getitem__)
    if any(sizes.values()) and not config.option.collectonly:
        from plait.testing import pool

        pool.warm_up()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run a marked test on the pool instead of here."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    from plait.testing import jobs, reports

    outcomes = _pool(pyfuncitem.config).run(
        jobs.Job(
            module=pyfuncitem.module.__name__,
            path=str(pyfuncitem.path),
            qualname=_qualname(pyfuncitem),
            group=None,
            local_arguments=_local_arguments(pyfuncitem),
            rewrite_asserts=True,
        ),
        _world_size(pyfuncitem),
        kwargs=_arguments(pyfuncitem),
        timeout_s=marker.kwargs.get("timeout", _DEFAULT_TIMEOUT_S),
    )
    for number, outcome in enumerate(outcomes):
        if outcome.output:
            pyfuncitem.add_report_section("call", f"output of rank {number}", outcome.output)
    if reports.failed_ranks(outcomes):
        pytest.fail(reports.describe(outcomes), pytrace=False)
    reasons = [outcome.text for outcome in outcomes if outcome.status == "skipped"]
    if reasons:
        pytest.skip(reasons[0])
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the pool with the session."""
    pool = config.stash.get(_POOL, None)
    if pool is not None:
        pool.close()


@pytest.fixture
def rank_pool(request: pytest.FixtureRequest) -> Iterator["Pool"]:
    """A pool of its own, for tests that look at failures of ranks."""
    from plait.testing.pool import Pool

    with Pool() as pool:
        yield pool


def _pool(config: pytest.Config) -> "Pool":
    from plait.testing.pool import Pool

    if _POOL not in config.stash:
        config.stash[_POOL] = Pool(_DEFAULT_TIMEOUT_S)
    return config.stash[_POOL]


def _world_size(item: pytest.Item) -> int:
    """The item's number of ranks; 0 for an ordinary test."""
    callspec = getattr(item, "callspec", None)
    if item.get_closest_marker("ranks") is None or callspec is None:
        return 0
    size: int = callspec.params["world_size"]
    return size


def _qualname(item: pytest.Function) -> str:
    name = item.originalname
    return f"{item.cls.__qualname__}.{name}" if item.cls is not None else name


def _argument_names(item: pytest.Function) -> tuple[str, ...]:
    return tuple(item._fixtureinfo.argnames)


def _local_arguments(item: pytest.Function) -> tuple[str, ...]:
    return tuple(name for name in _argument_names(item) if name in LOCAL_ARGUMENTS)


def _arguments(item: pytest.Function) -> dict[str, Any]:
    """Fixture values for the ranks, each checked to be picklable so that the culprit is named."""
    values = {
        name: item.funcargs[name] for name in _argument_names(item) if name not in LOCAL_ARGUMENTS
    }
    problems = [problem for name in values if (problem := _unpicklable(name, values[name]))]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
    return values


def _unpicklable(name: str, value: object) -> str | None:
    try:
        pickle.dumps(value)
    except Exception as error:
        return (
            f"the value of `{name}` ({type(value).__name__}) cannot be pickled to the ranks: "
            f"{error}. Build it inside the test body, or pass what it is built from."
        )
    return None
