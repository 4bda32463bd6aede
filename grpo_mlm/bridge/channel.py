"""A connection between two processes of one machine: short messages, file descriptors, and the other's death.

The address lies in Linux's abstract namespace: it is no file, so a process that is killed leaves nothing behind.
What file permissions would do is done by asking the kernel who is at the other end.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from contextlib import suppress

from grpo_mlm.errors import PeerGone, RunFailure

_LONGEST = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Listener:
    """An address at which one other process of the same user can connect."""

    def __init__(self) -> None:
        self.address = f"grpo_mlm-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(1)

    def accept(self, peer: str, timeout_s: float) -> Channel:
        """Wait for the other process, and take no further ones."""
        self._socket.settimeout(timeout_s)
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            raise RunFailure(f"{peer} did not connect to the trainer rank on its device: {error}") from error
        finally:
            self.close()
        return Channel(connection, peer, timeout_s)

    def close(self) -> None:
        self._socket.close()


def connect(address: str, peer: str, timeout_s: float) -> Channel:
    """The other end of a `Listener`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"\0{address}")
    except OSError as error:
        connection.close()
        raise RunFailure(
            f"{peer} is not there; trainer and engine must be on one machine: {error}"
        ) from error
    return Channel(connection, peer, timeout_s)


class Channel:
    """Messages arrive whole and in order. A wait ends with the message, the other's end, or the time-out."""

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer, self._socket = peer, connection
        self.set_timeout(timeout_s)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.getuid():
            connection.close()
            raise RunFailure(f"{peer}: a process of user {user} answers, expected one of user {os.getuid()}")

    def set_timeout(self, timeout_s: float) -> None:
        """Longest wait from now on."""
        self._timeout_s = timeout_s
        self._socket.settimeout(timeout_s)

    def send(self, message: bytes, fds: list[int] | None = None) -> None:
        """Put a message, and copies of file descriptors, on their way."""
        try:
            socket.send_fds(self._socket, [message], fds or [])
        except OSError as error:
            raise self._failure(error) from error

    def recv(self, max_fds: int = 0) -> tuple[bytes, list[int]]:
        """The next message and what came with it."""
        try:
            message, fds, _, _ = socket.recv_fds(self._socket, _LONGEST, max_fds)
        except OSError as error:
            raise self._failure(error) from error
        if not message:
            raise PeerGone(f"{self.peer} ended the handoff: it died or failed")
        return message, fds

    def close(self) -> None:
        """Ends the waits of both sides at once, also one in another thread of this process."""
        with suppress(OSError):  # it may be closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _failure(self, error: OSError) -> RunFailure:
        if isinstance(error, TimeoutError):
            return RunFailure(f"{self.peer}: no word from it within {self._timeout_s:.0f} s")
        return PeerGone(f"{self.peer} ended the handoff: it died or failed ({error})")
