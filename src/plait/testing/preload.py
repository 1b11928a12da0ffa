"""Imported once by the fork server, so that every rank starts with these modules already loaded.

A rank forked from the server costs milliseconds instead of the seconds that importing torch and
transformers takes. Nothing here may start a thread or a process group: forked ranks inherit this
process as it is. plait's own rooms are left out: a rank imports them after it has decided whether
their annotations are checked.
"""

import contextlib
import gc
import importlib

THIRD_PARTY = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.testing",
    "numpy",
    "safetensors.torch",
    "yaml",
    "beartype",
    "jaxtyping",
    "pytest",
    "hypothesis",
    "transformers",
    "transformers.modeling_utils",
    "transformers.core_model_loading",
    "transformers.conversion_mapping",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)

for _name in THIRD_PARTY:
    with contextlib.suppress(Exception):  # optional ones may be absent; a test says so itself
        importlib.import_module(_name)

with contextlib.suppress(ImportError):
    # Progress bars share a semaphore between processes, which a killed rank would leave behind.
    import threading

    import tqdm

    tqdm.tqdm.set_lock(threading.RLock())

# What is loaded so far never dies: keeping it out of the collector's sight makes the collections
# between tests cheap and keeps the pages shared between the forked ranks.
gc.collect()
gc.freeze()
