"""The whole suite runs with plait's annotations checked, here and in the ranks."""

from plait.testing import typecheck

typecheck.install()
