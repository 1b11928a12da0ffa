"""What the parts of an attention are called, in the names that models use."""

from plait.plan import words as known

FUSED = {
    "colwise_qkv": "qkv",
    "colwise_qkv_per_head": "qkv",
    "colwise_qkv_per_group": "qkv",
    "colwise_kv": "kv",
    "colwise_kv_per_head": "kv",
}
"""Styles of fused projections → their role."""

HEAD_STYLES = frozenset(
    {"colwise", "rowwise", "head_params", "head_embedding", "split_norm", *FUSED}
)
"""Styles that cut a dimension on the borders of heads, where it is made of heads."""

NUM_HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "num_q_heads",
    "heads",
    "nhead",
    "decoder_attention_heads",
)
NUM_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "num_kv",
    "kv_heads",
    "num_query_groups",
)
HEAD_DIM = (
    "head_dim",
    "attention_head_size",
    "head_size",
    "dim_head",
    "key_value_proj_dim",
    "d_kv",
    "kv_channels",
    "d_head",
    "dim_per_head",
)

_QUERY = known.QUERY | known.MLA_QUERY
_WRAPPED = frozenset({"linear", "base_layer"})
"""Names of a linear layer inside a module that is called as the projection."""

_KEY_NORMS = (
    "k_norm",
    "key_norm",
    "k_layernorm",
    "key_layernorm",
    "k_ln",
    "norm_k",
    "ln_k",
    "k_layer_norm",
)


def role(name: str, style: str) -> str:
    """Returns q, k, v, qkv, kv, kv_b, o, or "heads" for what has an entry for each query head."""
    last = projection(name).rpartition(".")[2]
    if style in FUSED:
        return FUSED[style]
    if style == "rowwise":
        return "o"
    if last in _QUERY:
        return "q"
    if last in known.KEY or any(norm in name for norm in _KEY_NORMS):
        return "k"
    if last in known.VALUE:
        return "v"
    if last in known.MLA_KV:
        return "kv_b"
    return "heads"


def projection(name: str) -> str:
    """The name of a projection, without that of a linear layer inside of it."""
    above, _, last = name.rpartition(".")
    return above if last in _WRAPPED else name


def is_query(name: str, style: str) -> bool:
    """Whether an entry is a query projection, or a fused one that holds it."""
    return role(name, style) in ("q", "qkv") and style not in ("rowwise", "split_norm")


def is_output(name: str) -> bool:
    """Whether the name is that of a projection at the end of an attention."""
    return projection(name).rpartition(".")[2] in known.OUTPUT


def is_extra(name: str) -> bool:
    """Whether the name is that of a projection that gates heads or says something about each."""
    return projection(name).rpartition(".")[2] in known.GATE | known.PER_HEAD_EXTRA
