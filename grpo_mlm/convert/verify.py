"""Compares two sets of stored weights, whatever their formats: every canonical tensor, bit by bit, block by block.

No model is built and no tensor is read whole: memory is bounded whatever the size of the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from grpo_mlm.convert.covers import Cover, covers
from grpo_mlm.convert.difference import Tally
from grpo_mlm.convert.open import Weights
from grpo_mlm.convert.options import Options, Progress
from grpo_mlm.layouts.boxes import Box, volume
from grpo_mlm.layouts.hf import EMBEDDING, HEAD
from grpo_mlm.layouts.weights import Shape, full

BYTES_PER_ELEMENT = 64  # both sides, both widened, the mask, and differences where all elements differ


@dataclass(frozen=True)
class Compared:
    """One canonical tensor of side A against B; `shape_b` differs from `shape` where nothing could be compared."""

    tensor: str
    stored_a: tuple[str, ...]
    stored_b: tuple[str, ...]
    dtype_a: str
    dtype_b: str
    shape: Shape
    shape_b: Shape
    nbytes: int  # of both sides
    tally: Tally = field(default_factory=Tally)

    @property
    def equal(self) -> bool:
        return self.shape == self.shape_b and not self.tally.differing

    @property
    def only_rounded(self) -> bool:
        """The sides differ in dtype, and in nothing but the rounding to the narrower one."""
        return (
            not self.equal
            and self.shape == self.shape_b
            and self.dtype_a != self.dtype_b
            and self.tally.rounds_equal
        )


@dataclass(frozen=True)
class Verdict:
    """What came of a comparison. The names are those of canonical tensors.

    `not_compared`: tensors that config.json does not describe, and those that it describes and neither side has.
    `allowed`: names of all three kinds that a pattern lets pass; they are in no other list.
    """

    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    not_compared: tuple[str, ...]
    allowed: tuple[str, ...]
    compared: tuple[Compared, ...]
    bytes_read: int

    @property
    def same_names(self) -> bool:
        return not (self.only_in_a or self.only_in_b or self.not_compared)

    @property
    def same_tensors(self) -> bool:
        """In names and in shapes."""
        return self.same_names and all(one.shape == one.shape_b for one in self.compared)

    @property
    def different(self) -> list[Compared]:
        return [one for one in self.compared if not one.equal]

    @property
    def other_dtype(self) -> list[Compared]:
        """Equal in value, but of other dtypes."""
        return [one for one in self.compared if one.equal and one.dtype_a != one.dtype_b]


def verify(a: Weights, b: Weights, options: Options, progress: Progress) -> Verdict:
    """Compare all tensors that both sides have. Of the options: workers, memory_limit and allow_missing.

    Both sides were opened with all names allowed to differ that shall be told of, instead of ending the work. A head
    that is stored although it is tied to the embedding, on either side, is compared with the embedding.
    """
    same = {HEAD: EMBEDDING} if a.spec.tied or b.spec.tied else {}
    in_a, in_b = covers(a.store, same), covers(b.store, same)
    jobs = [
        job for tensor in in_a if tensor in in_b for job in _comparisons(tensor, in_a[tensor], in_b[tensor])
    ]
    progress.start(sum(map(_nbytes, jobs)), 0)
    block = max(1, options.memory_limit // (options.workers * BYTES_PER_ELEMENT))
    with ThreadPoolExecutor(options.workers) as pool:
        try:
            compared = tuple(pool.map(lambda job: _compare(job, block, progress), jobs))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return _verdict(a, b, in_a.keys(), in_b.keys(), options.allow_missing, compared)


def _verdict(
    a: Weights,
    b: Weights,
    in_a: Collection[str],
    in_b: Collection[str],
    patterns: Sequence[str],
    compared: tuple[Compared, ...],
) -> Verdict:
    """Sort the names that could not be compared."""
    only_in_a = [name for name in in_a if name not in in_b]
    only_in_b = [name for name in in_b if name not in in_a]
    neither = {*a.skipped, *b.skipped} - {*in_a, *in_b}
    names = (*only_in_a, *only_in_b, *neither)
    allowed = {name for name in names if a.passes(name, patterns) or b.passes(name, patterns)}
    return Verdict(
        only_in_a=tuple(name for name in only_in_a if name not in allowed),
        only_in_b=tuple(name for name in only_in_b if name not in allowed),
        not_compared=tuple(sorted(neither - allowed)),
        allowed=tuple(sorted(allowed)),
        compared=compared,
        bytes_read=sum(one.nbytes for one in compared),
    )


Job = tuple[str, Cover, Cover]


def _comparisons(tensor: str, in_a: list[Cover], in_b: list[Cover]) -> Iterator[Job]:
    """The first of A with all of B, then the others of A with the first of B: all are proven equal."""
    for cover in in_b:
        yield tensor, in_a[0], cover
    for cover in in_a[1:]:
        yield tensor, cover, in_b[0]


def _compare(job: Job, block: int, progress: Progress) -> Compared:
    tensor, a, b = job
    shape, shape_b = _shape(a), _shape(b)
    one = Compared(tensor, a.stored, b.stored, _name(a.dtype), _name(b.dtype), shape, shape_b, _nbytes(job))
    for box in _blocks(shape, block) if shape == shape_b else ():
        one.tally.add(a.read(box), b.read(box), tuple(start for start, _ in box))
        progress.advance(volume(box) * (a.dtype.itemsize + b.dtype.itemsize))
    return one


def _blocks(shape: Shape, most: int) -> Iterator[Box]:
    """Blocks of rows of at most `most` elements; of columns, where one row is more."""
    height, *rest = shape
    width = volume(full(tuple(rest)))
    step = max(1, most // width)
    for top in range(0, height, step):
        rows = (top, min(top + step, height))
        if not rest:
            yield (rows,)
            continue
        for left in range(0, width, most):
            yield rows, (left, min(left + most, width))


def _shape(cover: Cover) -> Shape:
    return tuple(
        max(piece.box[axis][1] for piece in cover.pieces) for axis in range(len(cover.pieces[0].box))
    )


def _nbytes(job: Job) -> int:
    _, *both = job
    return sum(volume(full(_shape(cover))) * cover.dtype.itemsize for cover in both)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
