"""The sync benchmark on a tiny model: both ways end with equal tensors (it asserts that), ours moves fewer bytes."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.weight_sync import measure
from grpo_mlm.layouts.boxes import volume
from grpo_mlm.layouts.model import canonical_tensors, read_model_spec

CONFIG = {
    "model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "vocab_size": 130, "max_position_embeddings": 64,
}  # fmt: skip


def test_slices_move_every_byte_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    ours, theirs = measure(str(tmp_path), "tp=2,pp=2", "tp=2", runs=1, bucket_mb=1).rows
    shapes = canonical_tensors(read_model_spec(tmp_path))
    whole = sum(volume(tuple((0, n) for n in shape)) for shape in shapes.values())
    replicated = sum(
        shape[0] for shape in shapes.values() if len(shape) == 1
    )  # norms are on both engine ranks
    assert ours["bytes received"] == 2 * (whole + replicated)
    assert theirs["bytes received"] > 2.5 * ours["bytes received"]
