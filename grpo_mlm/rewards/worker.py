"""A grading process: reads one task a line, answers one line. Text that a model wrote is judged in here.

Started by `worker_pool.py` as a fresh interpreter, so nothing of the parent (threads, locks, signal handlers,
`__main__`) comes along. A task that runs too long is ended by the parent; should the parent be gone, by the
kernel's limit on processor time. An idle worker ends when the parent's end of its pipe closes.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import sys
import time
from typing import Any

MEMORY_BYTES = 4 << 30
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.remove", "os.rename",
    "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.truncate", "os.kill", "subprocess.Popen",
    "socket.connect", "socket.bind", "socket.sendto", "shutil.rmtree", "shutil.move", "ctypes.dlopen",
)  # fmt: skip


def main(handler: str) -> None:
    """Serve `handler`, `module:function` of one dict -> plain data, until the input closes."""
    logging.disable(logging.CRITICAL)
    module, _, function = handler.partition(":")
    handle = getattr(importlib.import_module(module), function)
    replies = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not look like a reply
    _lock_down()
    _reply(replies, {"ready": True})
    for line in sys.stdin.buffer:
        task = json.loads(line)
        _limit_processor_time(task["seconds"])
        started = time.perf_counter()
        try:
            reply = {"value": handle(task["task"])}
        except Exception as error:  # any failure of any library is this task's result, not the worker's end
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        _reply(replies, reply | {"seconds": time.perf_counter() - started})


def _lock_down() -> None:
    """No writing, no programs, no network, bounded memory: graders need none, an injected program would."""
    sys.dont_write_bytecode = True
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & _WRITING
        if writes or event in _FORBIDDEN:
            raise PermissionError(f"{event} is not allowed in a grading process")

    sys.addaudithook(refuse)


def _limit_processor_time(seconds: float) -> None:
    """The kernel ends this process well after the parent would have, even inside one long C call."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 2, hard))


def _reply(file: int, reply: dict[str, Any]) -> None:
    try:
        os.write(file, json.dumps(reply).encode() + b"\n")
    except BrokenPipeError:
        os._exit(0)  # the parent has gone


if __name__ == "__main__":
    main(sys.argv[1])
