"""The target's own answers: the same whatever was interrupted and whatever ran beside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from foretell.cli import main
from foretell.llm import LLM
from foretell.models.hub import resolve
from foretell.models.tokenizer import Tokenizer
from foretell.sequence import SamplingParams
from foretell.train.config import RegenerateConfig
from foretell.train.files import Lines, read_lines
from foretell.train.regenerate import regenerate
from tests import tiny
from tests.train import rig

ROWS = [
    *({"prompt": letter * (3 + i)} for i, letter in enumerate("abcdefgh")),
    {"turns": ["abc", "def", "ghi"]},
    {"messages": [{"role": r, "content": c} for r, c in (("user", "xy"), ("assistant", "z"))]},
]
CONFIG = RegenerateConfig(max_tokens=12, temperature="0,1")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Rows of an unbroken run, by index."""
    run = tmp_path_factory.mktemp("whole")
    rig.prepared(model, run, ROWS)
    out = regenerate(rig.engine(model), CONFIG, run)
    assert not out.failed
    return {row["index"]: row for row in rig.read_rows(run / "answers.jsonl")}


def rows_of(run):
    return {row["index"]: row for row in rig.read_rows(run / "answers.jsonl")}


def test_every_answer_is_the_targets_own(model, whole, tmp_path):
    assert sorted(whole) == list(range(len(ROWS)))
    llm = LLM(model, weights="f32", page_size=4, kv_memory="8MiB", threads=1)
    for index, row in whole.items():
        assert row["temperature"] == index % 2
        assert len(row["spans"]) == len(ROWS[index].get("turns", "."))
        if index % 2:
            continue
        for start, end in row["spans"]:
            params = SamplingParams(temperature=0, max_tokens=12)
            (result,) = llm.generate(row["tokens"][:start], params)
            assert result.token_ids == row["tokens"][start:end]
    text = Tokenizer.load(resolve(model)).decode(whole[8]["tokens"], skip_special=False)
    for turn in ("u abc</s>\na ", "</s>\nu def</s>\na ", "</s>\nu ghi</s>\na "):
        assert text.count(turn) == 1
    assert "</s></s>" not in text


@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {"max_num_seqs": 16, "page_size": 8}])
def test_answers_do_not_depend_on_what_runs_beside(options, model, whole, tmp_path):
    rig.prepared(model, tmp_path, ROWS)
    config = rig.engine(model, **options)
    regenerate(config, CONFIG, tmp_path)
    assert rows_of(tmp_path) == whole


def test_another_seed_is_another_text(model, whole, tmp_path):
    rig.prepared(model, tmp_path, ROWS)
    regenerate(
        rig.engine(model), RegenerateConfig(max_tokens=12, temperature="0,1", seed=1), tmp_path
    )
    other = rows_of(tmp_path)
    assert [other[i] == whole[i] for i in whole] == [i % 2 == 0 for i in whole]


@pytest.mark.parametrize("stop", [0, 3, 9])
def test_an_interruption_costs_nothing_that_was_finished(stop, model, whole, tmp_path, monkeypatch):
    rig.prepared(model, tmp_path, ROWS)
    path, append = tmp_path / "answers.jsonl", Lines.append
    count = iter(range(100))

    def interrupted(self, row):
        if next(count) == stop:
            raise KeyboardInterrupt
        append(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(Lines, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            regenerate(rig.engine(model), CONFIG, tmp_path)
    before = path.read_bytes()
    assert before.count(b"\n") == stop
    path.write_bytes(before + b'{"tokens": [3, 4')
    again = regenerate(rig.engine(model), CONFIG, tmp_path)
    assert again.num_kept == stop
    assert path.read_bytes().startswith(before)
    assert rows_of(tmp_path) == whole
    assert regenerate(rig.engine(model), CONFIG, tmp_path).num_tokens == 0


def test_other_settings_or_samples_are_refused(model, tmp_path):
    rig.prepared(model, tmp_path, ROWS[:3])
    regenerate(rig.engine(model), CONFIG, tmp_path)
    with pytest.raises(ValueError, match=r"answers.jsonl was made with max_tokens=12, not 13"):
        regenerate(rig.engine(model), RegenerateConfig(max_tokens=13, temperature="0,1"), tmp_path)
    rig.prepared(model, tmp_path, ROWS[:4])
    with pytest.raises(ValueError, match="was made with samples="):
        regenerate(rig.engine(model), CONFIG, tmp_path)
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(ValueError, match="run prepare again"):
        regenerate(rig.engine(model), CONFIG, tmp_path)
    with pytest.raises(ValueError, match="train prepare --run"):
        regenerate(rig.engine(model), CONFIG, tmp_path / "none")


def test_another_target_is_refused(model, tmp_path):
    rig.prepared(model, tmp_path, ROWS[:3])
    other = rig.write_model(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"were prepared for .*, not for "):
        regenerate(rig.engine(other), CONFIG, tmp_path)


def test_rows_without_an_answer_are_named(model, tmp_path, capsys):
    """The end-of-text token is here what the model says first to one of the prompts."""
    rig.prepared(model, tmp_path / "before", ROWS[:6])
    greedy = RegenerateConfig(max_tokens=1)
    regenerate(rig.engine(model), greedy, tmp_path / "before")
    first = {i: row["tokens"][-1] for i, row in rows_of(tmp_path / "before").items()}
    mute = rig.write_model(tmp_path / "mute")
    config = json.loads((tmp_path / "mute/config.json").read_text())
    config["eos_token_id"] = [tiny.EOS, first[2]]
    (tmp_path / "mute/config.json").write_text(json.dumps(config))
    rig.prepared(mute, tmp_path, [*ROWS[:6], {"prompt": "a" * 300}])
    out = regenerate(rig.engine(mute, max_model_len=200), greedy, tmp_path)
    silent = [i for i in first if first[i] == first[2]]
    assert {i: out.failed[i] for i in silent} == dict.fromkeys(silent, "an empty answer")
    assert "max_model_len" in out.failed[6]
    assert sorted(rows_of(tmp_path)) == [i for i in range(6) if i not in silent]
    flags = ["--weights=f32", "--kv-memory=8MiB", "--threads=1", "--max-tokens=1"]
    assert main(["train", "regenerate", f"--model={mute}", f"--run={tmp_path}", *flags,
                 "--max-model-len=200"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert f"row {silent[0] + 1} of samples.jsonl has no answer: an empty answer" in said


def test_a_conversation_stops_where_no_room_is_left(model, tmp_path):
    rig.prepared(model, tmp_path, [{"turns": ["abc", "d" * 60]}])
    out = regenerate(rig.engine(model, max_model_len=40), RegenerateConfig(max_tokens=4), tmp_path)
    (row,) = rig.read_rows(tmp_path / "answers.jsonl")
    assert not out.failed
    assert len(row["spans"]) == 1
    assert row["spans"][0][1] == len(row["tokens"])


# ---- the file


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "lines.jsonl"
    with Lines(path) as lines:
        lines.append({"a": 1})

        class Full:
            def __init__(self, file):
                self.file, self.calls = file, 0

            def write(self, data):
                self.calls += 1
                if self.calls > 1:
                    raise OSError(28, "No space left on device")
                return self.file.write(data[:4])

            def __getattr__(self, name):
                return getattr(self.file, name)

        whole_file, lines._file = lines._file, Full(lines._file)
        with pytest.raises(OSError, match=r"No space left.*lines.jsonl"):
            lines.append({"b": 2})
        lines._file = whole_file
        lines.append({"c": 3})
    assert path.read_text() == '{"a":1}\n{"c":3}\n'


def test_torn_lines_are_cut_off_and_two_writers_are_refused(tmp_path):
    path = tmp_path / "lines.jsonl"
    for text, left in (
        ("{}\n{", 1),
        ("{", 0),
        ("", 0),
        ("{}\n{}\n", 2),
        ("{}\n" + "x" * 3_000_000, 1),
    ):
        path.write_text(text)
        assert len(list(read_lines(path))) == left
        with Lines(path) as lines:
            with pytest.raises(ValueError, match="another process is writing"):
                Lines(path)
            lines.append({})
        assert path.read_text() == "{}\n" * (left + 1)


def test_a_second_writer_does_not_change_what_the_first_said_of_its_answers(model, tmp_path):
    rig.prepared(model, tmp_path, ROWS[:3])
    regenerate(rig.engine(model), CONFIG, tmp_path)
    path = tmp_path / "answers.jsonl"
    path.write_text("")  # as before the first answer is there
    before = path.with_suffix(".json").read_text()
    with Lines(path), pytest.raises(ValueError, match="another process is writing"):
        regenerate(rig.engine(model), RegenerateConfig(max_tokens=5), tmp_path)
    assert path.with_suffix(".json").read_text() == before


@pytest.mark.slow
def test_killed_and_run_again(model, whole, tmp_path):
    rig.prepared(model, tmp_path, ROWS)
    path = tmp_path / "answers.jsonl"
    command = [
        *(sys.executable, "-m", "foretell", "train", "regenerate", "--weights=f32"),
        *(f"--model={model}", f"--run={tmp_path}", "--max-tokens=12", "--temperature=0,1"),
        *("--page-size=4", "--kv-memory=8MiB", "--threads=1", "--max-num-seqs=1"),
    ]
    for number in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE)
        have = path.read_bytes().count(b"\n") if path.exists() else 0
        while process.poll() is None:
            if path.exists() and path.read_bytes().count(b"\n") >= have + 2:
                process.send_signal(number)
                break
            time.sleep(0.001)
        process.communicate()
    assert subprocess.run(command, env=os.environ, check=False).returncode == 0
    assert rows_of(tmp_path) == whole


def test_texts_stay_as_they_are_and_count_as_a_whole(model, tmp_path):
    rows = [{"text": "abc def " * 6}, {"prompt": "ab"}, {"text": 7}, {"text": " "}]
    out = rig.prepared(model, tmp_path, rows, max_len=20)
    assert {reason: len(places) for reason, places in out.dropped.items()} == {
        "text is not a string": 1,
        "empty": 1,
    }
    texts = [row for row in rig.read_rows(tmp_path / "samples.jsonl") if row.get("given")]
    assert [len(row["tokens"]) for row in texts] == [20, 20, 8]
    assert [row["spans"] for row in texts] == [[[1, 20]], [[1, 20]], [[1, 8]]]
    answers = regenerate(rig.engine(model), RegenerateConfig(max_tokens=8), tmp_path)
    assert not answers.failed
    made = sorted(rig.read_rows(tmp_path / "answers.jsonl"), key=lambda row: row["index"])
    assert [row["tokens"] for row in made[:3]] == [row["tokens"] for row in texts]
    assert len(made) == 4
    assert regenerate(rig.engine(model), RegenerateConfig(max_tokens=8), tmp_path).num_kept == 4
