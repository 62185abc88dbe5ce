"""Files that are either whole or not there, and JSON."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import pathlib
import re
import secrets
import shlex
import socket
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import numpy as np

try:
    import fcntl
except ImportError:  # elsewhere than on Unix nothing is locked
    fcntl = None


LOG = logging.getLogger(__name__)
LOCK = ".lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # by another process, not unknown to the file system
MISREAD = re.compile(r"\[[^\]]+\]|\\|gs:/")
STRAY = re.compile(r"\..+\.[0-9a-f]{8}(\.[a-z]+)?")  # as `atomic_file` names what it writes to
DIGEST_LENGTH = 32  # hexadecimal digits
# What reading a damaged .npz file raises: of the file, the archive, its compression, or an array's header.
UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, MemoryError, OverflowError),
    # Of a flag that means another compression, or a password.
    *(NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error),
)


@contextlib.contextmanager
def atomic_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a path beside `path` to write to, and renames it to `path` once all went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = new_file(path.parent, f".{path.name}.", path.suffix)
    os.close(descriptor)
    try:
        with _naming(path):
            yield pathlib.Path(name)
        with contextlib.suppress(FileNotFoundError):
            os.chmod(name, stat.S_IMODE(os.stat(path).st_mode))
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def new_file(folder: pathlib.Path, prefix: str, suffix: str) -> tuple[int, str]:
    """As `tempfile.mkstemp`, but for others to read where any new file is."""
    while True:
        name = folder / f"{prefix}{secrets.token_hex(4)}{suffix}"
        with contextlib.suppress(FileExistsError):
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), str(name)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """A full disk does not say of which file it is."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes JSON; numbers that are not finite become null, as JSON has none."""
    with atomic_file(path) as beside:
        beside.write_text(json.dumps(plain(content), indent=2, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """What JSON would give back: lists for tuples and arrays, numbers of Python's types, None for NaN."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A sealed JSON file, without its seal; one of a version that knew no seals is taken as it is.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it cannot be read, or is not what was written.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; put back what was written there")
    try:
        return unsealed(content)
    except ValueError:
        raise ValueError(f"{path} is not what was written there: edited or damaged; put it back as it was") from None


def is_sealed(path: pathlib.Path) -> bool:
    """Whether a JSON file, which `read_json` has read, had a seal."""
    return "seal" in json.loads(path.read_text(encoding="utf-8"))


def quoted(path: str | os.PathLike) -> str:
    """A path as a shell takes it.

    >>> quoted("runs/ifca"), quoted("my runs/ifca")
    ('runs/ifca', "'my runs/ifca'")
    """
    return shlex.quote(os.fspath(path))


def digest(value: Any) -> str:
    """Of bytes, of an array's, or of a value's JSON.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    if isinstance(value, (np.ndarray, np.generic)):
        value = np.ascontiguousarray(value).tobytes()
    elif not isinstance(value, bytes):
        value = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(value, digest_size=DIGEST_LENGTH // 2).hexdigest()


def file_digest(path: pathlib.Path) -> str:
    """The `digest` of a file's bytes, of which only some are in memory at a time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_LENGTH // 2)).hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with a digest of the rest of it."""
    content = plain(dict(content))
    return {**content, "seal": digest(content)}


def unsealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The object that was sealed.

    Raises:
      ValueError: it is another one. Where there is no seal nothing is checked.
    """
    for name, value in content.items():
        rest = {other: each for other, each in content.items() if other != name}
        # The seal itself, or one whose name is damaged.
        if name == "seal" and value != digest(rest):
            raise ValueError("the seal is that of other content")
        if name != "seal" and isinstance(value, str) and len(value) == DIGEST_LENGTH and value == digest(rest):
            raise ValueError(f"the seal has another name, {name!r}")
    return {name: value for name, value in content.items() if name != "seal"}


def _opened(path: pathlib.Path, attempts: int = 5) -> IO[bytes]:
    """The file that locks a directory."""
    try:
        # What is not flushed, as on a full disk, would be tried again as the file is closed.
        return path.open("ab+", buffering=0)
    except FileNotFoundError:  # another process, which was refused, has removed the empty directory
        if attempts == 1:
            raise
        path.parent.mkdir(parents=True, exist_ok=True)
        return _opened(path, attempts - 1)


def _locked(file: IO[bytes], directory: pathlib.Path) -> bool:
    """Whether this process has the lock, or nobody can."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            return False
        # Such as NFS without its lock daemon.
        LOG.warning(
            f"the file system of {directory} has no locks ({error.strerror}): nothing keeps two processes from working "
            "in it at once"
        )
    return True


class Taken(ValueError):
    """A directory that another process works in."""


@contextlib.contextmanager
def taken(directory: pathlib.Path) -> Iterator[Callable[[], bool]]:
    """Keeps other processes out of a directory, as long as this one lives; gives whether it is still that directory.

    The operating system lets go of the lock of a process that dies, however it does. A directory that is removed
    meanwhile, and made anew, is another.

    Raises:
      Taken: another process has it; says which.
      ValueError: something else has the lock's name.
    """
    path = directory / LOCK
    if path.is_dir():
        raise ValueError(f"{path} is a directory, where a run keeps others out by a file; remove it")
    with _opened(path) as file:

        def same() -> bool:
            with contextlib.suppress(OSError):
                return os.path.samestat(path.stat(), os.fstat(file.fileno()))
            return False

        if not (_locked(file, directory) and same()):
            file.seek(0)
            owner = (file.read() or b"").decode(errors="replace").strip() or "another process"
            raise Taken(f"{directory} is in use by {owner}; wait for its end, or choose another directory")
        try:
            with _naming(path):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            yield same
        finally:
            if same():
                path.unlink(missing_ok=True)


def remove_empty(directory: pathlib.Path) -> None:
    """Removes a directory with nothing in it."""
    with contextlib.suppress(OSError):
        directory.rmdir()


def remove_strays(directory: pathlib.Path) -> None:
    """Removes what `atomic_file` leaves in a directory where its process was killed."""
    for path in directory.glob(".*.*") if directory.is_dir() else ():
        if STRAY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def check_writable(directory: pathlib.Path, attempts: int = 5) -> None:
    """Raises a ValueError where no file can be made in `directory`, before anything is computed for it.

    Leaves nothing behind: a directory that was not there is not there afterwards.
    """
    missing: list[pathlib.Path] = []
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, probe = new_file(directory, ".probe.", "")  # which another process does not take for a file
        os.close(descriptor)
        os.unlink(probe)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and attempts > 1:  # another process checks it, and has removed it again
            return check_writable(directory, attempts - 1)
        raise ValueError(f"cannot write to the directory {directory} ({error.strerror}); choose another one") from error
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def is_file_by_now(path: pathlib.Path) -> bool:
    """Whether a file is there, which another machine may just have made.

    NFS believes for half a minute that a name is not there, unless the directory that has it is opened.
    """
    for folder in (path.parent.parent, path.parent):
        with contextlib.suppress(OSError):
            os.listdir(folder)
    return path.is_file()


def check_run_directory(directory: pathlib.Path) -> None:
    """`check_writable`, and a ValueError where checkpoints that are made in `directory` could not be read again."""
    if found := MISREAD.search(str(directory.absolute())):
        raise ValueError(
            f"the run directory {directory.absolute()} has {found[0]!r} in its path, which orbax takes for a pattern, "
            "so that checkpoints could not be read again; choose another one"
        )
    check_writable(directory)
