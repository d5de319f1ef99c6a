"""A checkpoint is whole or not there, whatever kills its writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from foretell.train.checkpoints import Checkpoints


def test_the_newest_are_kept(tmp_path):
    kept = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 30, 100_000_000):
        kept.save(step, {"x": torch.full((3,), float(step))}, {"lr": 1})
    assert kept.steps() == [30, 100_000_000]
    assert kept.load(30, {"lr": 1})["x"].tolist() == [30.0] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000030", "step-100000000"]


def test_other_settings_and_damage_are_refused(tmp_path):
    kept = Checkpoints(tmp_path)
    kept.save(5, {"x": 1}, {"lr": 1, "seed": 0})
    with pytest.raises(ValueError, match="lr was 1 and is 2"):
        kept.load(5, {"lr": 2, "seed": 0})
    with pytest.raises(ValueError, match="new was None and is 3"):
        kept.load(5, {"lr": 1, "seed": 0, "new": 3})
    state = kept.directory(5) / "state.pt"
    state.write_bytes(state.read_bytes()[:-40])
    with pytest.raises(ValueError, match="step-00000005 cannot be read"):
        kept.load(5, {"lr": 1, "seed": 0})


def test_a_failed_save_leaves_the_former_one(tmp_path):
    kept = Checkpoints(tmp_path, keep=1)
    kept.save(1, {"x": 1}, {})

    def fails(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        kept.save(2, {"x": 2}, {}, fails)
    assert kept.steps() == [1]
    assert kept.load(1, {}) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


WRITER = """
import sys, time, torch
from pathlib import Path
from foretell.train.checkpoints import Checkpoints
kept = Checkpoints(Path(sys.argv[1]), keep=1)
kept.save(1, {"x": torch.arange(5)}, {})
def slow(path):
    (path / "more").write_text("half")
    print("saving", flush=True)
    time.sleep(60)
kept.save(2, {"x": torch.arange(9)}, {}, slow)
"""


def test_killed_while_saving(tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "saving\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    kept = Checkpoints(tmp_path, keep=1)
    assert list(tmp_path.glob(".step-*"))
    assert kept.steps() == [1]
    assert kept.load(1, {})["x"].tolist() == [0, 1, 2, 3, 4]
    kept.save(2, {"x": 2}, {})
    assert kept.steps() == [2]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


RUN = """
import sys
from pathlib import Path
from tests.train.test_trainer import trainer
from tests.train.tiny import tiny_loss
import foretell.train.checkpoints as checkpoints
trainer(Path(sys.argv[1]), max_steps=300, save_every=1, log_every=1).fit()
"""


def test_a_run_killed_anywhere_goes_on_bit_for_bit(tmp_path):
    """Saves at each step, so that a kill at no chosen time falls into one or near one."""
    from tests.train.test_trainer import losses

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for path, delays in ((broken, (0.05, 0.13, 0.31)), (whole, ())):
        for delay in delays:
            process = subprocess.Popen([sys.executable, "-c", RUN, str(path)], env=environment)
            before = len(Checkpoints(path).steps()) and Checkpoints(path).steps()[-1]
            while process.poll() is None and not any(
                step > before for step in Checkpoints(path).steps()
            ):
                time.sleep(0.01)
            time.sleep(delay)
            process.kill()
            process.wait()
        subprocess.run([sys.executable, "-c", RUN, str(path)], env=environment, check=True)
    assert len(losses(whole)) == 300
    assert losses(whole) == losses(broken)
