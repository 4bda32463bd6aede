"""Which of several sources are nearest to a destination: on its device, else on its node, else all alike."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_mlm.errors import RunFailure

Names = tuple[str, ...] | None


class Nearness:
    """Devices and nodes of all ranks, sources first; None where they play no part."""

    def __init__(
        self, sources: int, destinations: int, device_of: Sequence[str] | None, node_of: Sequence[str] | None
    ) -> None:
        for what, names in (("device_of", device_of), ("node_of", node_of)):
            if names is not None and len(names) != sources + destinations:
                raise RunFailure(
                    f"{what} names {len(names)} ranks; there are {sources} sources and {destinations} destinations"
                )
        self.sources = sources
        self.names = tuple(tuple(names) for names in (device_of, node_of) if names is not None)
        self._found: dict[tuple[tuple[int, ...], tuple[str, ...]], tuple[int, ...]] = {}

    def nearest(self, holders: tuple[int, ...], destination: int) -> tuple[int, ...]:
        """Those of the source ranks `holders` that are nearest to a destination rank, in the same order."""
        if not self.names or len(holders) == 1:
            return holders
        there = tuple(names[self.sources + destination] for names in self.names)
        key = (holders, there)
        if key not in self._found:
            self._found[key] = self._nearest(holders, there)
        return self._found[key]

    def _nearest(self, holders: tuple[int, ...], there: tuple[str, ...]) -> tuple[int, ...]:
        for names, name in zip(self.names, there, strict=True):
            close = tuple(rank for rank in holders if names[rank] == name)
            if close:
                return close
        return holders
