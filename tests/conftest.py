"""The whole suite runs with plait's annotations checked, here and in the ranks.

What is only wider than another test, not different from it, is marked `wide` here and left out
unless asked for (`make test-wide`): see `pytest_collection_modifyitems`.
"""

import os
import tempfile

import pytest
from hypothesis import settings

from plait.testing import typecheck

pytest_plugins = ["pytester"]  # for the tests of plait's own pytest plugin

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in the suite needs the network
_CACHE = tempfile.TemporaryDirectory(prefix="plait-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name  # verdicts of this code, for the ranks as well
settings.register_profile("plait", deadline=None)  # a busy machine is no bug
settings.load_profile("plait")
typecheck.install()


@pytest.fixture(scope="session")
def warm_commands(tmp_path_factory):
    """The directory of a `python`, `plait` and `torchrun` that start without importing torch."""
    from tests.docs import warm

    with warm.commands(tmp_path_factory.mktemp("warm")) as directory:
        yield directory


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Cases that are to run on 2, 3 and 4 ranks run on 2, and on 3 or on 4 in turn.

    Of the cases of a parametrized test the first runs on 3 and on 4 ranks, the second on 3, the
    third on 4, and so on; what is left out is marked `wide`. A test without parameters runs on
    all. `@pytest.mark.wide_ranks(2, 3)` names the numbers of ranks that are left out of a test.
    """
    cases = {}
    for item in items:
        marker, callspec = item.get_closest_marker("ranks"), getattr(item, "callspec", None)
        if marker is None or callspec is None:
            continue
        size = callspec.params["world_size"]
        left_out = item.get_closest_marker("wide_ranks")
        if left_out is not None and size in left_out.args:
            item.add_marker("wide")
        case = item.callspec.id.replace(f"{size}ranks", "", 1)
        if left_out is not None or not case or not {3, 4} <= set(marker.args):
            continue
        known = cases.setdefault(item.nodeid.partition("[")[0], {})
        number = known.setdefault(case, len(known))
        if number and size == (4 if number % 2 else 3):
            item.add_marker("wide")
