"""Layout → DeviceMesh. All of plait's process groups are made here, once per layout."""

from plait.mesh.building import SequenceAxes, axis, build, coordinates, flat, sequence_axes, world

__all__ = ["SequenceAxes", "axis", "build", "coordinates", "flat", "sequence_axes", "world"]
