"""Where metrics are kept: `metrics.jsonl` always, TensorBoard when asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path


class JsonlTracker:
    """One JSON object a line, flushed at once so that a killed run keeps what it logged."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # JSON has no NaN: an absent number is null.
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoardTracker:
    """Scalars by name; the x axis is the training step."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


Tracker = JsonlTracker | TensorBoardTracker
