"""What the pages find in their folder: tiny models under the names of the real ones."""

import os

import pytest

from tests.docs import blocks, tiny_hub


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """A folder with a small random model and tokenizer for each hub name that the pages use."""
    folder = tmp_path_factory.mktemp("hub")
    tiny_hub.make(folder)
    return folder


@pytest.fixture
def page_folder(tmp_path, hub, monkeypatch):
    """An empty folder in which `from_pretrained("HuggingFaceTB/…")` finds a local model."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model in hub.iterdir():
        (tmp_path / model.name).symlink_to(model)
    return tmp_path


@pytest.fixture
def started_warm(request, monkeypatch):
    """Lets `bash` blocks start their programs warm, where the system can do it."""
    if hasattr(os, "pidfd_open"):
        monkeypatch.setattr(blocks, "COMMANDS", [request.getfixturevalue("warm_commands")])
