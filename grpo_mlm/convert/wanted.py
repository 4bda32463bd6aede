"""The layout that a conversion writes, less what its source is allowed to lack."""

from __future__ import annotations

from grpo_mlm.bridge.hf_store import some, without
from grpo_mlm.convert.open import Weights
from grpo_mlm.convert.target import Format
from grpo_mlm.errors import NamesDiffer
from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.hf import hf_layout
from grpo_mlm.layouts.megatron_dist import DistLayout, dist_layout


def wanted_layout(source: Weights, output: Format) -> Layout:
    """The tensors to write. Those that would hold nothing but what the source lacks are left out too.

    NamesDiffer where a tensor would be filled in part: no value is made up.
    """
    whole: Layout = (
        dist_layout(source.spec) if output == "torch_dist" else hf_layout(source.spec, source.hf_names)
    )
    held = {piece.tensor for piece in source.store.layout.pieces}
    filled = {piece.local for piece in whole.pieces if piece.tensor in held}
    empty = whole.shapes.keys() - filled
    torn = sorted(
        {piece.tensor for piece in whole.pieces if piece.tensor not in held and piece.local in filled}
    )
    if torn:
        raise NamesDiffer(
            f"{source.store.folder} lacks {some(torn)}, which the output stores in one tensor with weights that are "
            "there; it cannot leave them out"
        )
    if not empty:
        return whole
    rest = without(whole, empty)
    if not isinstance(whole, DistLayout):
        return rest
    stored = {name: shape for name, shape in whole.stored.items() if name in rest.shapes}
    return DistLayout(rest.shapes, rest.pieces, rest.fills, stored)
