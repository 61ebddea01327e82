"""The secret that processes of several machines share, and how two of them prove to each other that they have it.

    listener  -> connecting  a nonce
    connecting -> listener   a nonce, HMAC(secret, its side, both nonces, what it wants)
    listener  -> connecting  HMAC(secret, its side, both nonces, what it offers), what it offers

The secret never travels, an answer serves for one connection only, and neither side's answer can be sent back to it as
the other's. Data that follows is not encrypted: between hosts the network must be trusted, as it must be for weights.
"""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from typing import Literal

from tokenmill.core.errors import InvalidConfig

NONCE_BYTES = 32
PROOF_BYTES = 32
_FEWEST_BYTES = 16
_MOST_BYTES = 4096

Side = Literal["consumer", "producer", "head", "stage"]
"""Producers and consumers of KV, the head of several stages and the others: no side's proof serves for another."""


class Secret:
    """Makes and checks proofs."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def read(cls, path: str) -> Secret:
        """Read the secret from a file: all of its bytes but the white space around them.

        Raises:
            InvalidConfig: the file cannot be read, other users may read it, or its length is not that of a secret.
        """
        try:
            with Path(path).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                key = file.read(_MOST_BYTES + 1).strip() if stat.S_ISREG(mode) else b""
        except OSError as error:
            raise InvalidConfig(f"the secret file {path} cannot be read: {error.strerror}") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InvalidConfig(f"others may read the secret file {path}: chmod 600 it")
        if not _FEWEST_BYTES <= len(key) <= _MOST_BYTES:
            raise InvalidConfig(f"the secret in {path} must have {_FEWEST_BYTES} to {_MOST_BYTES} bytes")
        return cls(key)

    def prove(self, side: Side, *said: bytes) -> bytes:
        """Return the proof of one side over what was said, [PROOF_BYTES]."""
        whole = b"".join(len(part).to_bytes(4, "big") + part for part in (side.encode(), *said))
        return hmac.digest(self._key, whole, "sha256")

    def is_proof(self, proof: bytes, side: Side, *said: bytes) -> bool:
        """Return True if the other side has the secret. The check takes as long for every wrong proof."""
        return hmac.compare_digest(proof, self.prove(side, *said))
