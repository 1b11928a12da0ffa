"""The whole suite runs with plait's annotations checked, here and in the ranks."""

import os
import tempfile

from hypothesis import settings

from plait.testing import typecheck

pytest_plugins = ["pytester"]  # for the tests of plait's own pytest plugin

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in the suite needs the network
_CACHE = tempfile.TemporaryDirectory(prefix="plait-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name  # verdicts of this code, for the ranks as well
settings.register_profile("plait", deadline=None)  # a busy machine is no bug
settings.load_profile("plait")
typecheck.install()
