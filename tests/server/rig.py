"""A server on a free port over a tiny random model with a real tokenizer."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import httpx2 as httpx
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foretell.config import ServerConfig
from foretell.llm import LLM
from foretell.models.loader import LoadedModel, load
from foretell.server import run
from foretell.server.app import create_app
from tests import tiny

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call> {% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ m.tool_calls | default('') }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"
)
SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>"]  # id 1 ends a text, as in `tests.tiny`
LOOKUP = "prompt-lookup:k=6,ngram_min=1,patience=0"


@cache
def model() -> LoadedModel:
    """Tokens are the 256 bytes and a few pairs of letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("t", "h"), ("i", "n"), ("th", "e"), ("a", "n"), ("e", "r"), ("Ġ", "the")]
    words = [*SPECIAL, *letters, *(a + b for a, b in pairs)]
    vocabulary = {word: i for i, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocabulary, pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    path = tiny.write_model(Path(mkdtemp()), vocab_size=len(vocabulary))
    inner.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return load(str(path), "f32", progress=False)


def llm(speculation: str | None = None, **options) -> LLM:
    options = {"page_size": 4, "kv_memory": "8MiB", "threads": 1} | options
    return LLM(model(), speculation=tiny.fixed(speculation), weights="f32", **options)


class Server:
    """A running server and how to talk to it."""

    def __init__(self, engine: LLM, port: int, server: uvicorn.Server) -> None:
        self.llm, self.server = engine, server
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def post(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, **body) -> dict:
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, text: str = "hello", **body) -> dict:
        messages = [{"role": "user", "content": text}]
        answer = self.post("/v1/chat/completions", **({"messages": messages} | body))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **body) -> list[dict]:
        """Events of a stream, the last of which was [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]", lines[-1]
        return [json.loads(line) for line in lines[:-1]]

    def wait_idle(self) -> None:
        """Until nothing runs; then every page is free."""
        for _ in range(12_000):
            if not self.llm.engine.has_work:
                break
            time.sleep(0.01)
        time.sleep(0.02)
        tiny.check_idle(self.llm)


@contextmanager
def running(speculation: str | None = LOOKUP, engine: LLM | None = None, **config):
    """A server until the block ends."""
    engine = engine or llm(speculation)
    settings = ServerConfig(**({"port": 0, "served_model_name": "tiny"} | config))
    app = create_app(engine, settings)
    with run.listen(settings.host, settings.port) as listening:
        server = run.Server(app, settings)
        server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        made = Server(engine, listening.getsockname()[1], server)
        made.app = app  # type: ignore[attr-defined]
        made.thread = thread  # type: ignore[attr-defined]
        try:
            yield made
        finally:
            made.http.close()
            server.should_exit = True
            thread.join(120)
            assert not thread.is_alive()
