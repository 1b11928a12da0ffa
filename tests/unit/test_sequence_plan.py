"""What is decided about split sequences, from names and a plan alone."""

from plait.plan import ModelNames, resolve
from plait.plan.sequence import Region, sequence_plan
from plait.styles import ALL_PARALLEL_STYLES

ATTENTION = {"q": "Linear", "k": "Linear", "v": "Linear", "o": "Linear"}
RULES = {
    "layers.*.attn.q": "colwise",
    "layers.*.attn.k": "colwise",
    "layers.*.attn.v": "colwise",
    "layers.*.attn.o": "rowwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
}


def block(number: int, **more: str) -> dict[str, str]:
    parts = {"": "Block", "norm": "RMSNorm", "attn": "Attention", "mlp": "MLP"}
    parts |= {f"attn.{name}": kind for name, kind in ATTENTION.items()}
    parts |= {"mlp.up": "Linear", "mlp.act": "SiLU", "mlp.down": "Linear"}
    parts |= {name.replace("__", "."): kind for name, kind in more.items()}
    return {f"layers.{number}.{name}".rstrip("."): kind for name, kind in parts.items()}


def decided(modules: dict[str, str], rules: dict[str, str], dims: dict[str, int] | None = None):
    modules = {"": "Model", "embed": "Embedding", "layers": "ModuleList", **modules}
    params, owners = {}, {}
    for name, kind in modules.items():
        if kind == "Linear" or "norm" in name:
            shape = (4, 4) if kind == "Linear" else (4,) * (dims or {}).get(name, 1)
            params[f"{name}.weight"], owners[f"{name}.weight"] = shape, name
    names = ModelNames(modules, params, owners)
    return sequence_plan(names, resolve(names, rules, None, list(ALL_PARALLEL_STYLES)))


def test_regions_rows_and_what_sees_its_own_tokens():
    found = decided({**block(0), **block(1)}, RULES)
    (stack,) = found.stacks
    assert (stack.name, stack.owner, stack.blocks) == ("layers", "", ("layers.0", "layers.1"))
    assert stack.regions[:2] == (
        Region("layers.0.attn", cuts_output=False),
        Region("layers.0.mlp", cuts_output=False),
    )
    assert stack.rows[:2] == ("layers.0.attn.o", "layers.0.mlp.down")
    assert stack.per_token == ("layers.0", "layers.0.norm", "layers.1", "layers.1.norm")
    assert "layers.*.attn  all tokens × 2" in str(found)


def test_a_module_of_which_nothing_is_known_gets_all_tokens():
    more = {"conv": "Conv1d", "gate": "Linear", "rotary": "RotaryEmbedding", "bn": "BatchNorm1d"}
    (stack,) = decided(block(0, **more), RULES).stacks
    assert Region("layers.0.conv", cuts_output=True) in stack.regions
    assert Region("layers.0.bn", cuts_output=True) in stack.regions
    assert "layers.0.gate" in stack.per_token
    every = [region.name for region in stack.regions] + list(stack.per_token)
    assert "layers.0.rotary" not in every


def test_a_mixture_of_experts_is_one_region_whose_output_is_cut():
    more = {"moe": "Moe", "moe__router": "Router", "moe__experts": "Experts"}
    more |= {"moe__shared": "MLP", "moe__shared__up": "Linear", "moe__shared__down": "Linear"}
    rules = RULES | {
        "layers.*.moe.experts": "moe_tp_experts",
        "layers.*.moe.shared.up": "colwise",
        "layers.*.moe.shared.down": "rowwise",
    }
    (stack,) = decided(block(0, **more), rules).stacks
    assert Region("layers.0.moe", cuts_output=True) in stack.regions
    assert not any("moe" in name for name in (*stack.rows, *stack.per_token))


def test_rows_outside_of_every_region_and_columns_in_the_block_itself():
    modules = {
        "layers.0": "Block",
        "layers.0.attention": "Outer",
        "layers.0.attention.self": "Attention",
        "layers.0.attention.self.q": "Linear",
        "layers.0.attention.dense": "Linear",
        "layers.0.attention.norm": "LayerNorm",
        "layers.0.fc1": "Linear",
        "layers.0.fc2": "Linear",
    }
    rules = {
        "layers.*.attention.self.q": "colwise",
        "layers.*.attention.dense": "rowwise",
        "layers.*.fc1": "colwise",
        "layers.*.fc2": "rowwise",
    }
    (stack,) = decided(modules, rules).stacks
    assert [region.name for region in stack.regions] == [
        "layers.0.attention.self",
        "layers.0.fc1",
    ]
    assert stack.rows == ("layers.0.attention.dense", "layers.0.fc2")
    assert "layers.0.attention.norm" in stack.per_token


def test_pictures_stay_whole_and_lists_of_single_layers_are_no_blocks():
    modules = {f"vision.{name}": kind for name, kind in block(0).items()}
    modules |= {"vision": "Tower", "vision.layers": "ModuleList"}
    modules |= {"heads": "ModuleList", "heads.0": "Linear"}
    rules = {f"vision.{pattern}": style for pattern, style in RULES.items()}
    found = decided(modules, rules | {"heads.*": "colwise_gather_output"})
    assert found.stacks == ()
    assert found.whole == {"vision.layers": "blocks of pictures or sounds"}


def test_without_some_lists():
    found = decided(block(0), RULES).without(["layers"], "not reached")
    assert found.stacks == () and found.whole == {"layers": "not reached"}
