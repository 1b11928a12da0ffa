"""What the sweep goes over: model types, shapes of attention, numbers of ranks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SIZES = (2, 3, 4)

SHAPES: dict[str, dict[int, tuple[int, int]]] = {
    "ordinary": {2: (4, 2), 3: (6, 3), 4: (8, 4)},
    "uneven": {2: (9, 3), 3: (4, 2), 4: (9, 3)},
    "few": {2: (4, 1), 3: (4, 1), 4: (4, 1)},
    "pairs": {2: (6, 3)},
}
"""Query and key/value heads by number of ranks. In "pairs" only the query heads divide."""

WIDTHS = {"ordinary": 48, "uneven": 50, "few": 50, "pairs": 50}
"""Inner width of MLPs: one that divides by all sizes, one that does not."""

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}


@dataclass(frozen=True)
class Model:
    """One architecture with one head."""

    kind: str
    type: str
    class_name: str

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.type}"


@dataclass(frozen=True)
class Case:
    """One model in one shape on one number of ranks."""

    model: Model
    shape: str
    size: int

    @property
    def heads(self) -> tuple[int, int]:
        return SHAPES[self.shape][self.size]

    @property
    def width(self) -> int:
        return WIDTHS[self.shape]


def models(only: str = "") -> list[Model]:
    """All models whose name ("causal/llama") has the expression in it, each class once."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Model] = {}
    for kind, mapping in KINDS.items():
        for model_type, names in getattr(modeling_auto, mapping).items():
            class_name = names if isinstance(names, str) else names[0]
            one = Model(kind, model_type, class_name)
            if re.search(only, one.name):
                found.setdefault(f"{model_type}/{class_name}", one)
    return list(found.values())


def cases(
    only: str = "", sizes: tuple[int, ...] = SIZES, shapes: tuple[str, ...] = tuple(SHAPES)
) -> Iterator[Case]:
    """Every case, those of one model and shape together."""
    for model in models(only):
        for shape in shapes:
            for size in sizes:
                if size in SHAPES[shape]:
                    yield Case(model, shape, size)


def config_of(model: Model) -> Any:
    """The default config of a model type, as a decoder where the head needs one."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model.type]()
    if model.kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config
