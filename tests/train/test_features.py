"""Features: what the engine computes is what `forward` says, stored or on the way, in any order."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file

from foretell.cli import main
from foretell.files import alone
from foretell.models.loader import load
from foretell.train import features as stage
from foretell.train import store
from foretell.train.config import FeaturesConfig
from foretell.train.features import compute_features, open_batches, plan_features
from tests import tiny
from tests.models.tiny import Cache
from tests.reference import ReferenceAttention
from tests.train import rig

TAPS = (0, -1)
CONFIG = FeaturesConfig(taps="0,-1", topk=3, max_len=30)
SIZES = (3, 45, 12, 30, 1, 8, 29, 31, 17, 2)


def texts(seed=0):
    """Rows of different lengths, the second half of each an answer; the last has none."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for size in SIZES:
        tokens = torch.randint(2, tiny.VOCAB, (size,), generator=g).tolist()
        rows.append({"tokens": tokens, "spans": [[size // 2, size]]})
    return [*rows, {"tokens": [5, 6], "spans": []}]


@pytest.fixture
def run(tmp_path):
    rig.write_rows(tmp_path / "answers.jsonl", texts())
    return tmp_path


def compute(model, run, config=CONFIG, shard_bytes=3000, **options):
    plan, llm = plan_features(rig.engine(model, **options), config, run)
    compute_features(plan, llm, shard_bytes, run)
    return plan


def by_text(batches):
    """What an epoch holds of each text, by its tokens."""
    out = {}
    for batch in batches.epoch(0):
        for row in range(len(batch.tokens)):
            for number in range(int(batch.documents[row].max()) + 1):
                mine = batch.documents[row] == number
                parts = (batch.features, batch.hidden, batch.top_ids, batch.top_logits)
                known = [None if part is None else part[row][mine] for part in parts]
                out[tuple(batch.tokens[row][mine].tolist())] = (batch.wanted[row][mine], *known)
    return out


def expected(model):
    """By `forward` of whole texts, with the reference attention."""
    loaded = load(model, "f32", progress=False)
    out = {}
    for row in texts()[:-1]:
        tokens = row["tokens"][:30]
        logits, features = Cache(loaded, ReferenceAttention()).run(tokens, 0, taps=TAPS)
        out[tuple(tokens)] = (features, logits)
    return out


def test_what_is_stored_is_what_forward_says(model, run):
    compute(model, run)
    want, got = expected(model), by_text(open_batches(run, target=model, max_len=32))
    assert got.keys() == want.keys()
    for tokens, (wanted, features, hidden, top_ids, top_logits) in got.items():
        theirs, logits = want[tokens]
        assert torch.equal(features, features.bfloat16().float())
        torch.testing.assert_close(features, theirs, rtol=2**-8, atol=1e-4)
        assert torch.equal(hidden, features[:, 32:])
        top = logits.topk(3)
        assert torch.equal(top_ids, top.indices)
        torch.testing.assert_close(top_logits, top.values, rtol=2**-8, atol=1e-4)
        size = next(len(row["tokens"]) for row in texts() if tuple(row["tokens"][:30]) == tokens)
        assert wanted.tolist() == [i >= size // 2 for i in range(len(tokens))]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7}, {"kv_memory": "40KiB", "max_num_seqs": 16}],
)
def test_on_the_way_it_is_the_same_to_the_last_bit(options, model, run):
    """The second splits texts over passes, the third has pages for two texts at once."""
    compute(model, run)
    stored = by_text(open_batches(run))
    shutil.rmtree(run / "features")
    small = rig.engine(model, **options)
    plan, llm = plan_features(small, FeaturesConfig(**vars(CONFIG) | {"online": True}), run)
    compute_features(plan, llm, 1, run)
    assert [path.name for path in (run / "features").iterdir()] == ["index.json"]
    own = {"page_size": 4, "threads": 1, "max_num_seqs": 4, "kv_memory": "8MiB", **options}
    batches = open_batches(run, target=model, options=own)
    online = by_text(batches)
    assert batches.target == model
    for tokens, parts in stored.items():
        assert all(torch.equal(a, b) for a, b in zip(parts, online[tokens], strict=True))
    engine = batches.texts._llm.engine
    tiny.check_idle(batches.texts._llm)
    assert not engine.drafter._parts


def test_the_largest_logits_need_no_final_layer(model, run):
    compute(model, run)
    both = by_text(open_batches(run))
    shutil.rmtree(run / "features")
    compute(model, run, FeaturesConfig(**{**vars(CONFIG), "taps": "1"}))
    alone = by_text(open_batches(run))
    for tokens, (_, features, hidden, *top) in alone.items():
        assert features.shape[1] == 32
        assert hidden is None
        assert all(torch.equal(a, b) for a, b in zip(top, both[tokens][3:], strict=True))


def shards(run):
    return {path.name: path.read_bytes() for path in sorted((run / "features").iterdir())}


def test_shards_hold_whole_texts_in_order(model, run):
    plan = compute(model, run)
    index = json.loads((run / "features/index.json").read_text())
    assert plan.skipped == 1
    tokens, lengths = [], []
    for shard in index["shards"]:
        part = load_file(run / "features" / shard["file"])
        assert part["features"].dtype == part["top_logits"].dtype == torch.bfloat16
        assert part["tokens"].dtype == part["lengths"].dtype == part["top_ids"].dtype == torch.int32
        assert part["wanted"].dtype == torch.bool
        assert part["features"].shape == (len(part["tokens"]), 2 * 32)
        assert shard["texts"] == len(part["lengths"])
        tokens += part["tokens"].tolist()
        lengths += part["lengths"].tolist()
    assert len(index["shards"]) > 3
    assert lengths == [min(size, 30) for size in SIZES]
    assert tokens == [token for row in texts()[:-1] for token in row["tokens"][:30]]
    assert plan.index.num_tokens == sum(lengths)
    made = sum((run / "features" / s["file"]).stat().st_size for s in index["shards"])
    assert 0 < made - sum(lengths) * plan.index.bytes_a_token < 1000 * len(index["shards"])


@pytest.mark.parametrize("stop", [0, 2])
@pytest.mark.parametrize("where", ["before the shard", "between shard and index"])
def test_an_interruption_costs_one_shard(where, stop, model, run, monkeypatch):
    compute(model, run)
    whole = shards(run)
    shutil.rmtree(run / "features")
    name = "write_whole" if where == "before the shard" else "write_json"
    real, count = getattr(store, name), iter(range(100))

    def interrupted(path, value):
        counts = path.name.startswith("shard") or (name == "write_json" and value["shards"])
        if counts and next(count) == stop:
            raise KeyboardInterrupt
        real(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(store, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            compute(model, run)
    assert len(json.loads((run / "features/index.json").read_text())["shards"]) == stop
    kept = run / "features/shard-00000.safetensors"
    before = kept.stat().st_ino if stop else None
    compute(model, run)
    assert shards(run) == whole
    assert not stop or kept.stat().st_ino == before


def test_it_goes_on_when_answers_are_added(model, run):
    rows = texts()
    rig.write_rows(run / "answers.jsonl", rows[:4])
    compute(model, run)
    first = shards(run)
    rig.write_rows(run / "answers.jsonl", rows)
    plan = compute(model, run)
    assert plan.index.num_texts == len(SIZES)
    now = shards(run)
    assert all(now[name] == data for name, data in first.items() if name.startswith("shard"))
    rig.write_rows(run / "answers.jsonl", rows[1:])
    with pytest.raises(ValueError, match=r"holds other texts than answers.jsonl begins with"):
        compute(model, run)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"taps": "-1"}, r"made with taps=\[0, -1\], not \[-1\]"),
        ({"topk": 2}, "made with topk=3, not 2"),
        ({"max_len": 20}, "made with max_len=30, not 20"),
        ({"online": True}, "made with online=False, not True"),
        ({"taps": "0,2,-1"}, "tap 2: the target has layers 0 to 1"),
        ({"topk": 65}, "the vocabulary has 64 tokens"),
    ],
)
def test_features_of_another_kind_are_refused(changes, says, model, run):
    compute(model, run)
    with pytest.raises(ValueError, match=says):
        compute(model, run, FeaturesConfig(**{**vars(CONFIG), **changes}))


def test_features_of_another_target_are_refused(model, run, tmp_path):
    compute(model, run)
    other = rig.write_model(tmp_path / "other", seed=1)
    for use in (lambda: compute(other, run), lambda: open_batches(run, target=other)):
        with pytest.raises(ValueError, match=r"features holds features of .*, not of .*other"):
            use()
    with pytest.raises(ValueError, match="made with weights=f32, not int8"):
        compute(model, run, weights="int8")


def test_a_store_that_is_not_whole_is_refused(model, run):
    with pytest.raises(ValueError, match="run foretell train features first"):
        open_batches(run)
    compute(model, run)
    path = run / "features/shard-00001.safetensors"
    data = path.read_bytes()
    for damaged in (data[:-1], b"", data[:8] + b"x" + data[9:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"shard-00001.safetensors is missing or damaged"):
            open_batches(run)
    path.unlink()
    with pytest.raises(ValueError, match="missing or damaged"):
        open_batches(run)
    index = run / "features/index.json"
    for text, says in (("{", "cannot be read"), ('{"version": 2}', "format 2"),
                       ('{"version": 1}', "damaged")):  # fmt: skip
        index.write_text(text)
        with pytest.raises(ValueError, match=says):
            open_batches(run)


def test_a_second_writer_is_refused(model, run):
    plan, llm = plan_features(rig.engine(model), CONFIG, run)
    with alone(run), pytest.raises(ValueError, match="another process writes there"):
        compute_features(plan, llm, 3000, run)
    assert not (run / "features").exists()
    compute_features(plan, llm, 3000, run)


# ---- disk


def test_too_little_disk_is_said_beforehand(model, run, monkeypatch, capsys):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda path: usage(10_000))
    flags = [f"--model={model}", f"--run={run}", "--weights=f32", "--kv-memory=8MiB", "--threads=1"]
    assert main(["train", "features", *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for word in ("features of 178 tokens", "GB free", "--max-disk", "--online"):
        assert word in said
    assert not (run / "features").exists()
    assert main(["train", "features", *flags, "--max-disk=5KB"]) == 0
    said = capsys.readouterr().out
    assert "texts do not fit into 5KB" in said
    assert " kB to store at 69 bytes a token" in said
    assert open_batches(run).num_tokens * 69 <= 5000
    assert main(["train", "features", *flags, "--max-disk=9KB"]) == 0
    assert 5000 < open_batches(run).num_tokens * 69 <= 9000


def test_a_disk_that_fills_up_is_one_line(model, run, capsys):
    (run / "features").mkdir()
    (run / f"features/.shard-00000.safetensors.{os.getpid()}.part").symlink_to("/dev/full")
    flags = [f"--model={model}", f"--run={run}", "--weights=f32", "--kv-memory=8MiB", "--threads=1"]
    assert main(["train", "features", *flags]) == 2
    shard = run / "features/shard-00000.safetensors"
    assert capsys.readouterr().err == f"foretell: {shard}: No space left on device\n"
    assert main(["train", "features", *flags]) == 0
    assert open_batches(run).num_tokens == sum(SIZES)


def test_texts_that_cannot_be_used(model, run, capsys):
    (run / "answers.jsonl").unlink()
    with pytest.raises(ValueError, match=r"samples.jsonl is missing: make it with"):
        compute(model, run)
    for row, says in (
        ({"tokens": [99], "spans": []}, r"answers.jsonl:1: .*ids must be from 0 to 63"),
        ({"tokens": [9], "spans": [[0, 2]]}, "span 0 to 2 of 1 tokens"),
        ({"tokens": []}, "must be a list of ids"),
        ({"spans": []}, "lacks 'tokens'"),
        ({"tokens": [9], "spans": []}, "no text has an answer to learn from"),
    ):
        rig.write_rows(run / "answers.jsonl", [row])
        with pytest.raises(ValueError, match=says):
            compute(model, run)


def test_hidden_states_that_are_not_finite_stop_it_by_name(model, run, monkeypatch):
    plan, llm = plan_features(rig.engine(model), CONFIG, run)
    observe = llm.engine.drafter.observe

    def broken(commit):
        commit.features[0] = float("nan")
        observe(commit)

    monkeypatch.setattr(llm.engine.drafter, "observe", broken)
    with pytest.raises(ValueError, match=r"answers.jsonl text \d+: .*not finite"):
        compute_features(plan, llm, 3000, run)
