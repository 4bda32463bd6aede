"""What the system refuses, as one message with the right exit code."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_mlm.errors import OutOfResources, UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def system_errors() -> Iterator[None]:
    """OutOfResources where disk or memory ran out, UserError for all other calls that failed, with their file."""
    try:
        yield
    except MemoryError as error:
        raise OutOfResources("not enough memory; lower --memory-limit or --workers") from error
    except OSError as error:
        names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        said = f"{names}: {error.strerror}" if names and error.strerror else str(error)
        kind = OutOfResources if error.errno in _FULL else UserError
        raise kind(said) from error
