"""Arguments and options that the conversion commands share, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[
    Path, typer.Argument(metavar="SRC", help="weights: a folder, or a hub id", show_default=False)
]
Output = Annotated[
    Path,
    typer.Argument(metavar="DST", help="folder to write; must not exist, or be empty", show_default=False),
]
Side = Annotated[Path, typer.Argument(help="weights of any format", show_default=False)]
Targets = Annotated[
    list[str],
    typer.Argument(metavar="TARGET...", help="hf, dist, megatron:... or vllm:...", show_default=False),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="DTYPE",
        help="dtype to write: keep (as stored), bfloat16, float16 or float32; rounds to nearest",
    ),
]
ShardSize = Annotated[
    str, typer.Option(metavar="SIZE", help="largest output file, unless one tensor alone is larger")
]
DistShardSize = Annotated[
    str, typer.Option(metavar="SIZE", help="largest output file; 1GiB at most, whatever is given")
]
Workers = Annotated[
    int, typer.Option(min=1, metavar="N", help="files (verify: tensors) that are worked on at a time")
]
MemoryLimit = Annotated[
    str, typer.Option(metavar="SIZE", help="bytes of all buffers together; Python takes 300 MB more")
]
DiskSpeed = Annotated[
    str, typer.Option(metavar="SIZE", help="bytes a second, for the estimate of time; nothing is measured")
]
AllowMissing = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="let tensors whose names match (* and ? are wildcards) be missing or unexpected; repeatable; recorded",
        show_default=False,
    ),
]
Reference = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Hugging Face folder with config and tokenizer, for a Megatron checkpoint that does not carry them",
        show_default=False,
    ),
]
RemoteCode = Annotated[
    bool,
    typer.Option(
        "--allow-remote-code",
        "--trust-remote-code",
        help="accept a model folder that brings Python code, and copy it along; it is never run",
    ),
]
Restart = Annotated[
    bool,
    typer.Option("--restart", help="delete what an interrupted conversion left in DST.partial, begin anew"),
]
Check = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="after writing: none, hash (read the output back against the manifest's hashes), or full (compare every "
        "tensor with SRC)",
    ),
]
EachTensor = Annotated[bool, typer.Option("--tensors", help="a line for each tensor instead of each kind")]
Summary = Annotated[bool, typer.Option("--summary", help="totals only")]
AllowRounding = Annotated[
    bool,
    typer.Option(
        "--allow-rounding",
        help="accept tensors that differ in nothing but rounding to the narrower of two dtypes",
    ),
]
Logits = Annotated[
    bool,
    typer.Option(
        "--logits", help="also compare logits of a fixed prompt in float32; holds one whole model in memory"
    ),
]
LogitsTolerance = Annotated[
    float, typer.Option(min=0.0, metavar="X", help="largest absolute difference of logits that passes")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="print nothing but errors (and JSON, with --json)")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON on standard output")]
