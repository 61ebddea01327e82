"""The mapped file of a folder's tokenizer: found by what it was made of, or made now.

Files lie in a cache folder of this user alone. Each is written under another name and renamed, and its checksum is
looked at whenever it is opened: a broken one is made anew. What cannot be mapped is not an error: the library serves.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import mmap
import os
import stat
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tokenmill.core.regular_file import read_regular
from tokenmill.core.whole_file import whole_file
from tokenmill.model.vocabulary.recipe import JsonObject, NotCovered, Prefix, Recipe, build_vocabulary

if TYPE_CHECKING:
    from tokenmill._native import PieceEncoder, Vocabulary

_logger = logging.getLogger(__name__)

SUFFIX = ".vocabulary"
# Changes with the content of the files and with the rules that make them.
_VERSION = 1
# The library loads a smaller tokenizer.json as fast as a file is mapped.
LEAST_BYTES = 1 << 20
# Files that are kept; those used least recently go.
_MOST_FILES = 16
_SOURCES = ("tokenizer.json", "tokenizer_config.json")
# Flags of an added token.
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class MappedVocabulary:
    """A vocabulary in mapped memory, with the recipe of its tokenizer.

    Attributes:
        native: finds tokens and ids.
    """

    def __init__(self, path: Path) -> None:
        """Map a file.

        Raises:
            OSError: it cannot be opened, or is not this user's alone.
            ValueError: it is broken, or of another version.
        """
        with contextlib.closing(_PrivateFile(path)) as file:
            self._memory = mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ)
        self._array = np.frombuffer(self._memory, np.uint8)
        module: Any = native_module()
        self.native: Vocabulary = module.Vocabulary(self._array.ctypes.data, self._array.nbytes)
        if not self.is_sound():
            raise ValueError("its checksum is not that of its content")
        # The pages stay in the system's cache; this process holds those that it needs.
        self._memory.madvise(mmap.MADV_DONTNEED)
        self.recipe = msgspec.json.decode(self.native.notes, type=Recipe)

    def is_sound(self) -> bool:
        """Return True if the content is what was written; all of it is read."""
        return self.native.is_unchanged()

    def encoder(self, prefix: Prefix) -> PieceEncoder:
        """Return the encoder of pieces of text, by the recipe but for its prefix."""
        recipe, module = self.recipe, native_module()
        ids = [entry["id"] for entry in recipe.added]
        encoder: PieceEncoder = module.PieceEncoder(self.native, ids, recipe.spelling, prefix, recipe.is_split)
        return encoder


class _PrivateFile:
    """A regular file, open for reading, in which this user alone may write."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(self.descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS or not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(errno.EPERM, "it is not a file of this user alone", str(path))

    def close(self) -> None:
        os.close(self.descriptor)


def open_vocabulary(folder: Path, cache: Path) -> MappedVocabulary | None:
    """Return the mapped vocabulary of a folder's tokenizer, made now if the cache lacks it.

    None: it is small, the library alone knows all its parts, there is no native module, or the cache cannot be used.
    """
    source = folder / _SOURCES[0]
    if not source.is_file():  # the library says what is wrong
        return None
    try:
        if source.stat().st_size < LEAST_BYTES or native_module() is None:
            return None
        path = cache / f"{_key(folder)}{SUFFIX}"
        return _opened(path) or _opened(folder / path.name) or _made(path, folder)
    except NotCovered as error:
        _logger.debug("%s is read by the library: %s", source, error)
    except OSError as error:
        _logger.warning("the vocabulary of %s cannot be kept in %s: %s", source, cache, error.strerror or error)
    return None


def keep_vocabulary(folder: Path, content: bytes) -> None:
    """Write the mapped vocabulary of a folder's tokenizer beside it, where `open_vocabulary` looks too."""
    with whole_file(folder / f"{_key(folder)}{SUFFIX}", 0o600) as file:
        file.write(content)


def native_module() -> Any:
    """Return the native module; None: it was not built."""
    try:
        return importlib.import_module("tokenmill._native")
    except ImportError:
        return None


def _key(folder: Path) -> str:
    """Return a digest of the sources by place, size and time."""
    digest = sha256(f"{_VERSION}".encode())
    for name in _SOURCES:
        path = (folder / name).absolute()
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            digest.update(f"\0{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}".encode())
    return digest.hexdigest()[:32]


def _opened(path: Path) -> MappedVocabulary | None:
    """Return the file's vocabulary; None: there is none, or it is not sound."""
    try:
        vocabulary = MappedVocabulary(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _logger.warning("%s is made anew: %s", path, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return vocabulary


def _made(path: Path, folder: Path) -> MappedVocabulary:
    """Write the file and map it.

    Raises:
        NotCovered: the library alone knows all parts of the tokenizer.
        OSError: the sources cannot be read, or the file cannot be written.
    """
    content = build_vocabulary(read_regular(folder / _SOURCES[0]), _listed_tokens(folder), native_module())
    cache = path.parent
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(errno.EPERM, "others may write in this folder", str(cache))
    with whole_file(path, 0o600) as file:
        file.write(content)
    _remove_oldest(cache)
    try:
        return MappedVocabulary(path)
    except ValueError as error:
        raise OSError(errno.EIO, f"what was written is not there: {error}", str(path)) from error


def _remove_oldest(cache: Path) -> None:
    found = []
    for path in cache.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.lstat().st_mtime_ns, path))
    for _, path in sorted(found)[:-_MOST_FILES]:
        path.unlink(missing_ok=True)


def _listed_tokens(folder: Path) -> Sequence[JsonObject]:
    """Return the added tokens that tokenizer_config.json lists, as entries of tokenizer.json."""
    try:
        config = msgspec.json.decode(read_regular(folder / _SOURCES[1]))
    except (FileNotFoundError, ValueError):
        return []
    entries = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(entries, dict):
        return []
    return [
        {"content": text, "id": int(number), **{name: bool(entry.get(name)) for name in FLAGS}}
        for number, entry in sorted(entries.items(), key=lambda item: int(item[0]))
        if isinstance(entry, dict) and isinstance(text := entry.get("content"), str)
    ]
