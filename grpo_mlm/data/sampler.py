"""Which rows come next. Shuffled anew each epoch, and resumable to the row."""

from __future__ import annotations

from typing import Any

import numpy as np

from grpo_mlm.errors import UserError


class PromptSampler:
    """Hands out `batch_size` rows a step. An epoch's last rows are topped up from the next one, so none is lost.

    Each draw of a row is an instance of its own: its `group_id` is unique in the run. The order of an epoch
    depends on (seed, epoch) alone.
    """

    def __init__(self, rows: int, batch_size: int, shuffle: bool, seed: int) -> None:
        if rows < 1:
            raise ValueError(f"a sampler needs at least one row, got {rows}")
        self.rows, self.batch_size, self.shuffle, self.seed = rows, batch_size, shuffle, seed
        self.drawn = 0  # rows handed out since the run began; also the next group id
        self._order_of = -1
        self._order = np.arange(rows)

    @property
    def epoch(self) -> int:
        """Epoch of the next row, from 0."""
        return self.drawn // self.rows

    def next(self) -> list[tuple[int, int]]:
        """(group id, row) of the next step's prompts."""
        draws = [(group, self._row(group)) for group in range(self.drawn, self.drawn + self.batch_size)]
        self.drawn += self.batch_size
        return draws

    def _row(self, drawn: int) -> int:
        epoch, place = divmod(drawn, self.rows)
        if self.shuffle and epoch != self._order_of:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
            self._order_of = epoch
        return int(self._order[place])

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs to go on with the very next row."""
        return {"drawn": self.drawn, "rows": self.rows, "shuffle": self.shuffle, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; UserError when it belongs to an order of rows that is not this one."""
        for name, key in (
            ("rows", "usable rows of data.train_files"),
            ("shuffle", "data.shuffle"),
            ("seed", "run.seed"),
        ):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"the saved position in the data is for {key}={state[name]}, now it is {getattr(self, name)}: "
                    "rows would be lost or repeated; resume with the same data and seed, or start a new run"
                )
        self.drawn = int(state["drawn"])
