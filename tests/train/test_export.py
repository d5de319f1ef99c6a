"""Heads in other engines' layouts: nothing is lost, and what cannot be said is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foretell.models.frozen import FrozenTarget
from foretell.models.trainable_new import new_head
from foretell.train import export as exporting
from foretell.train.config import Format
from foretell.train.export import export, target_rows, write_head
from foretell.train.head_files import method_of, read_head
from tests import heads, tiny

Head = tuple[heads.Tensors, dict[str, Any]]


def rows(ids: Tensor | None) -> Tensor:
    return target_rows(str(tiny.model("f32").path))(ids)


def hass() -> Head:
    tensors, config = heads.eagle(norms=True)
    dropped = ("layers.0.input_layernorm.weight", "norm.weight")
    kept = {n: t for n, t in tensors.items() if n not in dropped}
    return kept, config | {"norm_attn": False, "norm_out": False, "norm_output": False}


def three_norms() -> Head:
    tensors, config = heads.eagle(norms=True)
    tensors.pop("hidden_states_layernorm.weight")
    return tensors, config | {"norm_hidden": False, "norm_output": False}


def wide_hass() -> Head:
    tensors, config = hass()
    wide, settings = heads.wide_eagle()
    more = {n: t for n, t in wide.items() if n.startswith(("fuse", "fc_norm"))}
    return tensors | more, settings | config


def shared_eagle3() -> Head:
    """Without an lm_head of its own: the target's rows of a reduced vocabulary."""
    tensors, config = heads.eagle3()
    tensors.pop("lm_head.weight")
    return tensors, config


def normed_eagle3() -> Head:
    tensors, config = heads.eagle3()
    return tensors, config | {"norm_before_residual": True}


def shared_medusa() -> Head:
    tensors, _ = heads.medusa()
    named = {
        f"blocks.{n[0]}.layers.0.{n.split('.')[-1]}": t for n, t in tensors.items() if "lin" in n
    }
    return named, {"vocab_size": tiny.VOCAB}


SERVED: list[tuple[Format, Any]] = [
    ("eagle", heads.eagle),
    ("eagle", hass),
    ("eagle", heads.eagle3),
    ("eagle", shared_eagle3),
    ("speculators", heads.eagle),
    ("speculators", three_norms),
    ("speculators", heads.eagle3),
    ("speculators", shared_eagle3),
    ("speculators", normed_eagle3),
    ("medusa", heads.medusa),
    ("medusa", lambda: heads.medusa(layers=2)),
    ("medusa", shared_medusa),
    ("foretell", heads.eagle),
    ("foretell", lambda: heads.eagle(norms=True)),
    ("foretell", heads.eagle3),
    ("foretell", heads.mtp),
    ("foretell", lambda: heads.mtp("qwen")),
    ("foretell", lambda: heads.mtp("mimo")),
    ("foretell", heads.medusa),
]
NAMES = [f"{form}-{i}" for i, (form, _) in enumerate(SERVED)]


def drafts(path: Path, more: str = "") -> list[list[list[int]]]:
    """What an engine proposes with this head, step by step: [step][sequence][node]."""
    options = ",k=3" if method_of(path) != "medusa" else ""
    llm = tiny.llm(f"{method_of(path)}:model={path}{options}{more}", prefix_caching=False)
    asked: list[list[list[int]]] = []
    propose = llm.engine.drafter.propose

    def record(ask: Any) -> Any:
        tree = propose(ask)
        asked.append(tree.tokens.tolist())
        return tree

    llm.engine.drafter.propose = record
    results = llm.generate(tiny.prompts(2, seed=2), tiny.greedy(max_tokens=12))
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
    assert sum(r.stats.drafted for r in results) > 15
    return asked


@pytest.mark.parametrize(("form", "maker"), SERVED, ids=NAMES)
def test_an_exported_head_drafts_the_same(form: Format, maker: Any, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    path = heads.write(*maker(), tmp_path / "head")
    export(path, tmp_path / "out", form, rows, verifier="org/target")
    assert drafts(tmp_path / "out") == drafts(path)


@pytest.mark.parametrize(("form", "maker"), SERVED, ids=NAMES)
def test_a_round_trip_is_bit_identical(form: Format, maker: Any, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    path = heads.write(*maker(), tmp_path / "head")
    export(path, tmp_path / "one", form, rows, verifier="org/target")
    export(tmp_path / "one", tmp_path / "two", form, rows, verifier="org/target")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert all(tensor.dtype == two[name].dtype for name, tensor in one.items())
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("one", "two")]
    assert configs[0] == configs[1]
    # What was there before is there still, whatever it is called now.
    before, after = read_head(path).tensors, read_head(tmp_path / "two").tensors
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    tensors, config = shared_eagle3()
    kinds = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    (tmp_path / "head").mkdir()
    export(heads.write(kinds, config, tmp_path / "head"), tmp_path / "out", "speculators", rows)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for n, t in written.items() if n.endswith("weight")} == {torch.bfloat16}
    assert written["d2t"].dtype == torch.int64
    assert written["t2d"].dtype == torch.bool


def test_weights_are_converted_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    path = heads.write(*heads.eagle3(), tmp_path / "head")
    export(path, tmp_path / "out", "foretell", rows, dtype="bf16")
    written, before = (load_file(p / "model.safetensors") for p in (tmp_path / "out", path))
    assert torch.equal(written["fc.weight"], before["fc.weight"].bfloat16())
    assert written["d2t"].dtype == torch.int64
    with pytest.raises(ValueError, match="choose one of f32, f16, bf16"):
        export(path, tmp_path / "out", "foretell", rows, dtype="int8")


IDS = torch.tensor([2, 3, 5, 8, 13, 21, 34, 40, 41, 42, 55, 60])


@pytest.mark.parametrize(
    ("form", "method", "norms"),
    [
        ("foretell", "eagle", True),
        ("foretell", "eagle3", True),
        ("foretell", "mtp", True),
        ("foretell", "medusa", True),
        ("eagle", "eagle", False),
        ("eagle", "eagle3", True),
        ("speculators", "eagle", False),
        ("speculators", "eagle3", True),
        ("medusa", "medusa", True),
    ],
)
@pytest.mark.parametrize("reduced", [False, True])
def test_heads_that_were_trained_here_leave(
    form: Format, method: str, norms: bool, reduced: bool, tmp_path: Path
) -> None:
    """With the target's own lm_head, over all tokens or some."""
    target = FrozenTarget.open(str(tiny.model("f32").path))
    head = new_head(method, target, norms=norms, draft_ids=IDS if reduced else None, num_heads=3)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=g)
    (tmp_path / "head").mkdir()
    path = heads.write(head.tensors(), head.config, tmp_path / "head")
    export(path, tmp_path / "out", form, rows, verifier="org/target")
    # EAGLE's first layouts know no reduced vocabulary: it goes beside the head.
    beside = tmp_path / "out" / "token_ids.pt"
    assert beside.exists() == (reduced and method == "eagle" and form != "foretell")
    more = f",draft_vocab={beside}" if beside.exists() else ""
    assert drafts(tmp_path / "out", more) == drafts(path)
    export(tmp_path / "out", tmp_path / "two", form, rows, verifier="org/target")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert (tmp_path / "two" / "token_ids.pt").exists() == beside.exists()


def test_layouts_have_the_keys_that_their_readers_want(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    path = heads.write(*heads.eagle3(), tmp_path / "head")
    made = export(path, tmp_path / "a", "eagle", rows)
    assert {"midlayer.hidden_norm.weight", "d2t", "t2d", "lm_head.weight"} <= set(made.tensors)
    assert made.settings["architectures"] == ["LlamaForCausalLMEagle3"]
    assert made.settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == heads.AUX
    made = export(path, tmp_path / "b", "speculators", rows, verifier="org/t", tokens=5)
    assert "layers.0.hidden_norm.weight" in made.tensors
    assert not any(name.startswith("midlayer.") for name in made.tensors)
    settings = json.loads((tmp_path / "b" / "config.json").read_text())
    assert settings["speculators_model_type"] == "eagle3"
    assert settings["norm_before_residual"] is False  # vLLM takes an absent key as true
    assert settings["draft_vocab_size"] == 40
    assert settings["transformer_layer_config"]["hidden_size"] == heads.HIDDEN
    inner = settings["speculators_config"]
    assert inner["proposal_methods"][0]["speculative_tokens"] == 5
    assert inner["verifier"] == {"name_or_path": "org/t", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "medusa").mkdir()
    path = heads.write(*heads.medusa(), tmp_path / "medusa")
    made = export(path, tmp_path / "c", "medusa", rows)
    assert {"blocks.2.layers.0.weight", "lm_heads.2.weight"} <= set(made.tensors)
    assert made.settings["num_heads"] == 3  # the source's config says 2
    assert made.settings["medusa_fc_bias"]
    assert not made.settings["original_lm_head"]


def test_medusa_heads_that_share_the_targets_rows_bring_them_along(tmp_path: Path) -> None:
    """vLLM wants them in the file; our engine does not look at them."""
    tensors, config = shared_medusa()
    ids = torch.tensor([3, 5, 60])
    for name, more in {"all": {}, "some": {"token_map": ids}}.items():
        (tmp_path / name).mkdir()
        path = heads.write(tensors | more, config, tmp_path / name)
        made = export(path, tmp_path / f"{name}-out", "medusa", rows)
        assert made.settings["original_lm_head"]
        assert made.settings["vocab_size"] == tiny.VOCAB
        assert torch.equal(made.tensors["lm_head.weight"], rows(ids if more else None))
        assert made.settings["truncated_vocab_size"] == (3 if more else tiny.VOCAB)


@pytest.mark.parametrize(
    ("form", "maker", "reason"),
    [
        ("eagle", lambda: heads.eagle(norms=True), "norm_attn, norm_embed, norm_hidden, norm_out"),
        ("eagle", three_norms, "norm_embed"),
        ("eagle", wide_hass, "further layers of the target"),
        ("eagle", normed_eagle3, "norm_before_residual"),
        ("eagle", heads.medusa, "a head of medusa"),
        ("eagle", heads.mtp, "a head of mtp"),
        ("speculators", lambda: heads.eagle(norms=True), "no place for norm_hidden"),
        ("speculators", heads.medusa, "export it as medusa"),
        ("speculators", heads.mtp, "MiMo and Qwen3-Next only"),
        ("medusa", heads.eagle, "a head of eagle"),
        ("gguf", heads.eagle, "choose one of foretell, eagle, speculators, medusa"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(
    form: Any, maker: Any, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "head").mkdir()
    path = heads.write(*maker(), tmp_path / "head")
    with pytest.raises(ValueError, match=reason):
        export(path, tmp_path / "out", form, rows)
    assert not (tmp_path / "out").exists()


def test_flags_that_other_readers_ignore_are_refused(tmp_path: Path) -> None:
    tensors, config = hass()
    (tmp_path / "head").mkdir()
    path = heads.write(tensors, config | {"norm_output": True}, tmp_path / "head")
    with pytest.raises(ValueError, match="norm_output"):
        export(path, tmp_path / "out", "eagle", rows)
    extra = tensors | {"layers.0.self_attn.q_norm.weight": torch.ones(heads.DIM)}
    with pytest.raises(ValueError, match="queries and keys"):
        export(heads.write(extra, config, path), tmp_path / "out", "eagle", rows)


def test_a_config_that_is_not_its_tensors_is_refused(tmp_path: Path) -> None:
    tensors, config = heads.eagle()
    (tmp_path / "head").mkdir()
    path = heads.write(tensors, config | {"num_attention_heads": 8}, tmp_path / "head")
    with pytest.raises(ValueError, match=r"q_proj has 32 rows, config\.json makes it 64"):
        export(path, tmp_path / "out", "foretell", rows)
    path = heads.write(tensors | {"colour.weight": torch.ones(2)}, config, path)
    with pytest.raises(ValueError, match=r"no place for tensor colour\.weight"):
        export(path, tmp_path / "out", "foretell", rows)
    path = heads.write(tensors | {"fc.weight": torch.full((32, 64), torch.nan)}, config, path)
    with pytest.raises(ValueError, match="NaN"):
        export(path, tmp_path / "out", "foretell", rows)


# ---- writing


def test_a_directory_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "out"
    write_head(out, {"a": 1}, {"x": torch.ones(2)})
    write_head(out, {"a": 2}, {"x": torch.zeros(2)})
    assert json.loads((out / "config.json").read_text()) == {"a": 2}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "save_file", full)
    with pytest.raises(ValueError, match="No space left"):
        write_head(out, {"a": 3}, {"x": torch.ones(2)})
    assert json.loads((out / "config.json").read_text()) == {"a": 2}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_what_is_no_head_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is no head"):
        write_head(tmp_path / "out", {}, {"x": torch.ones(2)})
    assert (tmp_path / "out" / "thesis.tex").exists()
    (tmp_path / "empty").mkdir()
    write_head(tmp_path / "empty", {}, {"x": torch.ones(2)})
