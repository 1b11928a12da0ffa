"""What a checkpoint contains, read from its headers alone: names, dtypes, shapes, byte ranges."""

from plait.shapes.files import CheckpointFiles, find_files, layout_of
from plait.shapes.safetensors import TensorEntry, encode_header, read_header

__all__ = [
    "CheckpointFiles",
    "TensorEntry",
    "encode_header",
    "find_files",
    "layout_of",
    "read_header",
]
