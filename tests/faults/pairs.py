"""Target and draft on disk, tiny, each with a tokenizer of one word for each id."""

from __future__ import annotations

import json
from pathlib import Path

from tests import tiny

WORDS = ["<unk>", "</s>", *[f"w{i}" for i in range(2, tiny.VOCAB)]]


def write_tokenizer(path: Path, words: list[str]) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "</s>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def write_pair(
    path: Path,
    *,
    target_words: list[str] = WORDS,
    draft_words: list[str] = WORDS,
    draft_positions: int = 512,
    draft_vocab: int = tiny.VOCAB,
    draft_seed: int = 0,
) -> tuple[Path, Path]:
    """Directories of a target and a draft; with the same seed and size the same weights."""
    target = tiny.write_model(path / "target")
    draft = tiny.write_model(
        path / "draft", seed=draft_seed, max_positions=draft_positions, vocab_size=draft_vocab
    )
    write_tokenizer(target, target_words)
    write_tokenizer(draft, draft_words)
    return target, draft
