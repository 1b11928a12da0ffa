"""The whole suite runs with plait's annotations checked, here and in the ranks."""

import os

from plait.testing import typecheck

pytest_plugins = ["pytester"]  # for the tests of plait's own pytest plugin

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in the suite needs the network
typecheck.install()
