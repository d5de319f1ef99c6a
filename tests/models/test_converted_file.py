"""Converted weights are kept in a file, and a start from it is the same model bit for bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from foretell.llm import LLM
from foretell.models import converted_file, loader
from foretell.models.checkpoint import Checkpoint
from foretell.models.loader import load
from tests import tiny

FORMATS = ("f32", "bf16", "int8", "int4")


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    return tiny.write_model(tmp_path / "model")


@pytest.fixture
def conversions(monkeypatch):
    """Formats that were converted, in order."""
    made = []
    convert = loader.convert
    monkeypatch.setattr(loader, "convert", lambda *given: made.append(given[2]) or convert(*given))
    return made


def tensors(path: Path, weights: str = "int8") -> dict[str, torch.Tensor]:
    model = load(str(path), weights, progress=False).model
    found = {"norm": model.norm, "table": model.embedding.table.packed.weights}
    found["head"], found["head scale"] = model.lm_head.packed
    for i, layer in enumerate(model.layers):
        for name in ("input_norm", "post_norm", "q_norm", "k_norm"):
            if getattr(layer, name) is not None:
                found[f"{i} {name}"] = getattr(layer, name)
        for name in ("qkv", "o", "gate_up", "down"):
            linear = getattr(layer, name)
            found[f"{i} {name} bias"] = linear.bias
            found[f"{i} {name}"], found[f"{i} {name} scale"] = linear.packed
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kept(path: Path, weights: str = "int8") -> Path:
    return path / ".foretell" / f"model.{weights}.weights"


def nothing_half_written(folder: Path) -> bool:
    return not list(folder.rglob("*.part"))


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "llama-biased", "qwen3"])
def test_a_kept_start_equals_a_first_and_an_unkept_one(
    weights, kind, tmp_path, monkeypatch, conversions
):
    from tests.models.tiny import make, save

    path = save(make(kind), tmp_path)
    first = tensors(path, weights)
    again = tensors(path, weights)
    assert conversions == [weights]
    monkeypatch.setattr(converted_file, "_places", lambda *_: [Path("/dev/null/no")])
    assert same(tensors(path, weights), first)
    assert same(again, first)
    assert conversions == [weights] * 2


@pytest.mark.parametrize("weights", FORMATS)
def test_tensors_lie_in_the_file_on_cache_lines(weights, path):
    mapped = tensors(path, weights)
    own = [name for name in mapped if name.endswith("bias")]
    assert all(mapped[name].data_ptr() % 64 == 0 for name in mapped if name not in own)
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if str(kept(path, weights)) in line]
    for name, tensor in mapped.items():
        if name not in own:
            at = tensor.data_ptr()
            assert any(int(low, 16) <= at < int(high, 16) for low, high in spans), name


def test_each_format_has_a_file_and_each_is_read_again(path, conversions):
    for weights in FORMATS * 2:
        tensors(path, weights)
    assert conversions == list(FORMATS)
    assert len(list((path / ".foretell").iterdir())) == 4


def test_a_model_that_drafts_for_itself_keeps_both_formats(path, conversions):
    for _ in range(2):
        scheme = "draft-model:weights=int4,k=2,adaptive=false"
        with LLM(str(path), speculation=scheme, kv_memory="8MiB") as llm:
            llm.generate([3, 4], tiny.greedy(max_tokens=4))
    assert conversions == ["int8", "int4"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b" ",
        lambda data: b"",
        lambda data: data[:40],
        lambda data: b"x" + data[1:],
        lambda data: bytes(64) + data[64:],
        lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
        lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:],
        lambda data: data[:15] + b"\x7f" + data[16:],
        lambda data: b"GGUF" * 100,
    ],
)
def test_what_is_damaged_or_foreign_is_made_anew(damage, path, conversions):
    first = {name: tensor.clone() for name, tensor in tensors(path).items()}
    data = kept(path).read_bytes()
    kept(path).unlink()
    kept(path).write_bytes(damage(data))
    assert same(tensors(path), first)
    assert conversions == ["int8"] * 2
    assert kept(path).read_bytes() == data


def test_a_change_of_the_model_replaces_the_file(path, conversions, monkeypatch):
    old = tensors(path)
    tiny.write_model(path, seed=1)
    new = tensors(path)
    assert not same(old, new)
    os.utime(path / "config.json", (1, 1))
    assert same(tensors(path), new)
    monkeypatch.setattr(converted_file, "_MADE_BY", ("quant",))  # other code
    assert same(tensors(path), new)
    assert conversions == ["int8"] * 4
    assert len(list((path / ".foretell").iterdir())) == 1


def test_a_file_beside_a_model_is_not_taken_for_another_model(path, tmp_path):
    other = tiny.write_model(tmp_path / "other", seed=1)
    expected = tensors(other)
    tensors(path)
    shutil.move(kept(path), kept(other))
    assert same(tensors(other), expected)


def refuse(place: Path, monkeypatch) -> None:
    """Lets nothing be made below a place, whoever runs the test."""
    mkdir = Path.mkdir

    def refusing(self: Path, *given, **named) -> None:
        if self.is_relative_to(place):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        mkdir(self, *given, **named)

    monkeypatch.setattr(Path, "mkdir", refusing)


def test_where_the_model_cannot_be_written_the_cache_directory_is(
    path, tmp_path, monkeypatch, conversions, caplog
):
    refuse(path, monkeypatch)
    first = tensors(path)
    assert same(tensors(path), first)
    assert conversions == ["int8"]
    assert not (path / ".foretell").exists()
    assert not caplog.records
    other = tiny.write_model(tmp_path / "other", seed=2)
    refuse(tmp_path, monkeypatch)
    a, b = tensors(other), tensors(other)
    assert same(a, b)
    assert conversions == ["int8"] * 3
    assert "Permission denied" in caplog.text


def test_a_full_disk_costs_a_warning(path, monkeypatch, conversions, caplog):
    expected = {name: tensor.clone() for name, tensor in tensors(path).items()}
    shutil.rmtree(path / ".foretell")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert same(tensors(path), expected)
    assert "No space left" in caplog.text
    assert nothing_half_written(path.parent)
    assert not list(path.parent.rglob("*.weights"))
    assert same(tensors(path), expected)
    assert kept(path).exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_leaves_nothing(error, path, monkeypatch):
    def interrupted(self: Checkpoint) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "finish", interrupted)
        with pytest.raises(error):
            tensors(path)
    assert list((path / ".foretell").iterdir()) == []
    tensors(path)


def test_what_a_killed_process_left_is_removed_after_a_while(path):
    (path / ".foretell").mkdir()
    old, new = (path / ".foretell" / f"model.int8.weights.{name}.part" for name in ("a", "b"))
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1, 1))
    tensors(path)
    assert not old.exists()
    assert new.exists()


def test_many_at_once(path):
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: tensors(path), range(8)))
    assert all(same(one, found[0]) for one in found)
    assert nothing_half_written(path)


PROCESS = """
import hashlib, sys, torch
from foretell.models.loader import load
model = load(sys.argv[1], "int8", progress=False).model
print(hashlib.sha256(model.layers[-1].down.packed.weights.numpy().tobytes()).hexdigest())
"""


def test_processes_at_once(path):
    command = [sys.executable, "-c", PROCESS, str(path)]
    many = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=500)[0] for process in many}
    assert [process.returncode for process in many] == [0] * 3
    assert len(said) == 1
    assert nothing_half_written(path)


def test_files_of_the_same_name_in_the_cache_directory_do_not_meet(path, tmp_path, monkeypatch):
    refuse(path, monkeypatch)
    other = tiny.write_model(tmp_path / "elsewhere" / "model", seed=1)
    refuse(tmp_path / "elsewhere", monkeypatch)
    a, b = tensors(path), tensors(other)
    assert not same(a, b)
    assert same(tensors(path), a)


def test_the_file_says_what_it_is_made_of(path):
    tensors(path)
    mark, offset, size, _ = converted_file._START.unpack(kept(path).read_bytes()[:64])
    table = json.loads(kept(path).read_bytes()[offset : offset + size])
    assert mark == b"foretel1"
    assert [name for name, *_ in table["made_of"]["files"]] == ["config.json", "model.safetensors"]
