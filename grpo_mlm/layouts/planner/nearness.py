"""Which of several sources are nearest to a destination: on its device, else on its node, else all alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from grpo_mlm.errors import RunFailure

Distance = Literal["same_device", "same_node", "other"]


class Nearness:
    """Devices and nodes of all ranks, sources first; None where they play no part."""

    def __init__(
        self, sources: int, destinations: int, device_of: Sequence[str] | None, node_of: Sequence[str] | None
    ) -> None:
        for what, names in (("device_of", device_of), ("node_of", node_of)):
            if names is not None and len(names) != sources + destinations:
                raise RunFailure(
                    f"{what} has {len(names)} names, but there are {sources} sources and {destinations} destinations; "
                    "give one name for each rank, sources first"
                )
        self._sources = sources
        self._device_of = None if device_of is None else tuple(device_of)
        self._node_of = None if node_of is None else tuple(node_of)
        self._found: dict[tuple[tuple[int, ...], tuple[str, ...]], tuple[int, ...]] = {}

    def nearest(self, holders: tuple[int, ...], destination: int) -> tuple[int, ...]:
        """Those of the source ranks `holders` that are nearest to a destination rank, in the same order."""
        levels = [names for names in (self._device_of, self._node_of) if names is not None]
        if not levels or len(holders) == 1:
            return holders
        key = (holders, tuple(names[self._sources + destination] for names in levels))
        if key not in self._found:
            self._found[key] = _closest(holders, levels, key[1])
        return self._found[key]

    def distance(self, source: int, destination: int) -> Distance:
        """How far a source is from a destination, as far as names were given."""
        there = self._sources + destination
        if self._device_of is not None and self._device_of[source] == self._device_of[there]:
            return "same_device"
        if self._node_of is not None and self._node_of[source] == self._node_of[there]:
            return "same_node"
        return "other"


def _closest(
    holders: tuple[int, ...], levels: Sequence[tuple[str, ...]], there: tuple[str, ...]
) -> tuple[int, ...]:
    for names, name in zip(levels, there, strict=True):
        close = tuple(rank for rank in holders if names[rank] == name)
        if close:
            return close
    return holders
