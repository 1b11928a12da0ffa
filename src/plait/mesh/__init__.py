"""Layout → DeviceMesh. All of plait's process groups are made here, once per layout."""

from plait.mesh.building import axis, build, coordinates, flat, world

__all__ = ["axis", "build", "coordinates", "flat", "world"]
