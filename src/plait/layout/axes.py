"""The mesh axes, their order, and which of them are built."""

AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""Mesh axes from outermost to innermost: neighbours in rank differ in tp first, because tp talks
most and belongs on the fastest links."""

SIZE_FIELDS = (*(f"{axis}_size" for axis in AXES), "ep_size")
"""The fields that hold a size, in axis order. Experts (ep) view the ranks of the other axes anew
and are no axis of their own, so ep_size is not a factor of WORLD_SIZE."""

UNBUILT = {
    "ep_size": "expert parallelism",
    "ep_implementation": "expert parallelism",
    "ep_plan": "expert parallelism",
}
"""Fields that are accepted and checked but whose feature does not exist in this version. One that
differs from its default is refused when the layout is resolved. Building a feature removes its
lines here. The names of backends are not among them: a file of accelerate's names them whatever the
sizes are, and they mean nothing at size 1."""
