"""What a plan is resolved against: the names and shapes of a model, without the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelNames:
    """Names, classes and shapes of one model; all that the plan room ever sees of it.

    Attributes:
        modules: Module name → class name, in module order; the root is `""`.
        params: Parameter name → full shape. A tied parameter appears under each of its names.
        owners: Parameter name → name of the module that holds it.
        tied: Parameter name → the first name of the same tensor, for every name but the first.
        base_prefix: Submodule that a plan may be relative to (`"model"`), or `""`.
        model: What to call the model in messages.
        facts: Module name → its public integer attributes (`num_heads`, `head_dim`, …; booleans as
            0 and 1). The integers of a module's config are there as `config.NAME`, under the first
            module that has this config. Under `""` stand the integers of the model's config under
            their own names, those of nested configs as `text_config.NAME`. `reads.NAME` is 1 where
            the module's own code reads the weight or bias of its part NAME (`self`: its own).
    """

    modules: Mapping[str, str]
    params: Mapping[str, tuple[int, ...]]
    owners: Mapping[str, str]
    tied: Mapping[str, str] = field(default_factory=dict)
    base_prefix: str = ""
    model: str = "the model"
    facts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
