"""Servers under everything at once, for minutes: do they leak, fail, or say something else?

    python benchmarks/soak.py --minutes 10 --threads 1 --json soak.json

One server for each scheme, all in this process; the clients go round from one to the next until the
time is up. They ask for random lengths, whole and streamed, with grammars, tools, predictions,
penalties, log-probabilities and several answers, with speculation and without, go away in the
middle and send nonsense. In the end: no 5xx, every answer equals the plain offline engine's for
its seed, all pages are free, and the process has not grown by more than 2% since it was warm (KV
memory, which is taken page by page, is touched before).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2 as httpx
import torch
from safetensors.torch import save_file
from soak_requests import NONSENSE, TEMPLATE, request, told, told_by_stream

from foretell.config import ServerConfig
from foretell.drafters import schemes
from foretell.llm import LLM
from foretell.models.chat_template import ChatTemplate
from foretell.models.loader import LoadedModel, load
from foretell.models.tokenizer import Tokenizer
from foretell.progress import progress_bar
from foretell.sequence import Sequence
from foretell.server.app import Service, create_app
from foretell.server.bridge import REST
from foretell.server.protocol import ChatRequest, CompletionRequest
from foretell.server.reply import Logprobs, Shape
from foretell.server.run import Server, listen

NUMBERS = 400  # different requests, few enough for the offline engine to answer them all
ROUNDS = 4  # visits to each server; the first warms up
LIMITS = {"max_num_seqs": 16, "max_model_len": 1024, "kv_memory": "64MiB"}


class Client:
    """Asks one server until the time is up."""

    def __init__(self, http: httpx.AsyncClient, seed: str, end: float, served: Served) -> None:
        self.http, self.rng, self.end, self.served = http, random.Random(seed), end, served
        self.counts = served.counts

    async def run(self) -> None:
        while time.monotonic() < self.end:
            kind = self.rng.random()
            if kind < 0.1:
                await self.nonsense()
            elif kind < 0.25:
                await self.leave()
            elif kind < 0.28:
                route = self.rng.choice(["/health", "/metrics", "/v1/models"])
                self.count((await self.http.get(route)).status_code)
            else:
                await self.ask()

    def count(self, status: int) -> None:
        self.counts["asked"] += 1
        self.counts[f"{status // 100}xx"] += 1

    async def nonsense(self) -> None:
        route, body = self.rng.choice(NONSENSE)
        headers = {"Content-Type": "application/json"}
        answer = await self.http.post(route, content=json.dumps(body), headers=headers)
        self.count(answer.status_code)
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["message"]

    async def leave(self) -> None:
        """Goes away from a long answer."""
        route, body = request(self.rng.randrange(NUMBERS))
        body |= {"max_tokens": 200, "ignore_eos": True, "stream": self.rng.random() < 0.7}
        try:
            async with asyncio.timeout(self.rng.random()):
                async with self.http.stream("POST", route, json=body) as answer:
                    self.count(answer.status_code)
                    await answer.aread()
        except TimeoutError:
            self.counts["left"] += 1

    async def ask(self) -> None:
        number = self.rng.randrange(NUMBERS)
        route, body = request(number)
        stream = self.rng.random() < 0.5
        body |= {"stream": stream} | self.in_what_way(number, stream)
        async with self.http.stream("POST", route, json=body) as answer:
            self.count(answer.status_code)
            raw = (await answer.aread()).decode()
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) > 0
            await asyncio.sleep(0.2)
            return
        assert answer.status_code == 200, raw
        if stream:
            lines = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
            assert lines.pop() == "[DONE]", raw
            said = told_by_stream([json.loads(line) for line in lines])
        else:
            said = told(json.loads(raw)["choices"])
        self.counts["answered"] += 1
        self.served.differing += self.served.said.setdefault(number, said) != said

    def in_what_way(self, number: int, stream: bool) -> dict[str, Any]:
        """What must not change the answer."""
        chance = self.rng.random()
        if chance < 0.15:
            return {"speculation": {"enabled": False}}
        if chance < 0.3 and self.served.llm.engine.k > 1:
            return {"speculation": {"k": self.rng.randint(1, 2)}}
        if chance < 0.45 and stream:
            return {"speculation": {"report": True, "trace": self.rng.random() < 0.5}}
        drafter = self.served.llm.engine.drafter
        if chance < 0.65 and drafter and drafter.needs.prediction:
            known = json.loads(self.served.said.get(number, '[{"text": "the cat sat"}]'))
            return {"prediction": {"type": "content", "content": known[0]["text"]}}
        return {}


class Served:
    """A server and what its clients found.

    Args:
        said: answers by number, shared by all servers: they must agree.
    """

    def __init__(self, llm: LLM, scheme: str, said: dict[int, str]) -> None:
        self.llm, self.scheme, self.said = llm, scheme, said
        self.counts: Counter[str] = Counter()
        self.differing = 0
        self.app = create_app(llm, ServerConfig(max_queue=24))
        self.socket = listen("127.0.0.1", 0)
        self.server = Server(self.app, ServerConfig())
        arguments = {"sockets": [self.socket]}
        self.thread = threading.Thread(target=self.server.run, kwargs=arguments, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    async def visit(self, clients: int, seconds: float, name: str) -> None:
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:
            end = time.monotonic() + seconds
            all_ = [Client(http, f"{name} {i}", end, self) for i in range(clients)]
            await asyncio.gather(*(client.run() for client in all_))

    def check(self) -> None:
        """Nobody is there any more: nothing may be left behind."""
        engine = self.llm.engine
        deadline = time.monotonic() + 10
        while engine.has_work and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)
        assert not engine.has_work, f"{self.scheme}: something is left behind"
        engine.check()
        assert engine.cache.num_free == engine.cache.num_pages, f"{self.scheme}: pages are missing"
        assert self.app.state.service.bridge.num_open == 0

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        self.socket.close()


def untrained_mtp(target: LoadedModel, path: Path) -> Path:
    """A random head of the kind that a model without one cannot have: it is always wrong."""
    c = target.config
    generator = torch.Generator().manual_seed(0)
    heads, kv, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    hidden = c.hidden_size
    shapes = {
        "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_proj": (hidden, 2 * hidden),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "token_layernorm": (hidden,), "hidden_layernorm": (hidden,), "final_layernorm": (hidden,),
    }  # fmt: skip
    tensors = {
        f"model.mtp_layers.0.{name}.weight": torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors")
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": 1, "num_attention_heads": c.num_heads, "head_dim": c.head_dim,
        "num_key_value_heads": c.num_kv_heads, "vocab_size": c.vocab_size, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 1024,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def specs(target: LoadedModel, folder: Path) -> list[str]:
    """Every scheme, the choice among several, and none."""
    own = {
        "prompt-lookup": "prompt-lookup:k=8,branches=2",
        "draft-model": "draft-model:weights=int4,k=3",
        "mtp": f"mtp:model={untrained_mtp(target, folder)},k=2",
        "eagle": "eagle:adaptive=false,depth=3,topk=2,nodes=8",
    }
    return [*(own.get(name, f"{name}:k=4") for name in schemes()), "auto", "none"]


def resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def offline(llm: LLM, numbers: list[int]) -> dict[int, str]:
    """What the plain engine answers to these requests, without a server."""
    service = Service(llm, ServerConfig())
    asked: dict[int, tuple[ChatRequest | CompletionRequest, list[Sequence]]] = {}
    for number in numbers:
        route, body = request(number)
        kind = ChatRequest if "chat" in route else CompletionRequest
        one = kind.model_validate(body)
        asked[number] = one, service.prepare(one, f"offline-{number}")[0]
    flat = [sequence for _, sequences in asked.values() for sequence in sequences]
    params = [replace(sequence.params, n=1, seed=sequence.seed) for sequence in flat]
    results = iter(llm.generate([s.tokens for s in flat], params, speculate=False, progress=True))
    out: dict[int, str] = {}
    for number, (one, sequences) in asked.items():
        chat = isinstance(one, ChatRequest)
        tools = service.calls if chat and one.offered else None
        choices: list[dict[str, Any]] = []
        for index, sequence in enumerate(sequences):
            top = sequence.params.logprobs
            logprobs = None if top is None else Logprobs(llm.tokenizer, top)
            splitter = tools.splitter() if tools else None
            choices.append(Shape(chat, "x", "x").choice(index, next(results), logprobs, splitter))
        out[number] = told(choices)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--speculation", action="append", help="only these schemes")
    parser.add_argument("--json", type=Path, help="writes the figures there")
    given = parser.parse_args()
    target = load(given.model)
    inner = target.tokenizer
    tokenizer = Tokenizer(inner.inner, inner.name, ChatTemplate(TEMPLATE, {}))
    said: dict[int, str] = {}
    folder = TemporaryDirectory()
    servers: list[Served] = []
    for spec in given.speculation or specs(target, Path(folder.name)):
        llm = LLM(target, speculation=spec, threads=given.threads, **LIMITS)
        llm.tokenizer = tokenizer
        for keys, values in chain(*llm.engine.runtime.kv.layers.values()):
            keys.zero_()  # pages take their memory when they are first used: that is no growth
            values.zero_()
        servers.append(Served(llm, spec.partition(":")[0], said))
    sizes: list[float] = []
    end, visits, rest = time.monotonic() + given.minutes * 60, ROUNDS * len(servers), 0.0
    with progress_bar("visits", visits, lines=True) as advance:
        for round_ in range(ROUNDS):
            for served in servers:
                start = time.monotonic()
                seconds = max(1.0, (end - start) / visits - rest)
                asyncio.run(served.visit(given.clients, seconds, f"{round_} {served.scheme}"))
                served.check()
                visits, rest = visits - 1, time.monotonic() - start - seconds
                advance(1)
            time.sleep(2 * REST)  # as it is once nothing is going on
            sizes.append(resident())
            print(f"round {round_ + 1}: {sizes[-1]:.0f} MiB", file=sys.stderr)
    for served in servers:
        served.close()
    plain = LLM(target, threads=given.threads, **LIMITS)
    plain.tokenizer = tokenizer
    texts = offline(plain, sorted(said))
    differing = sum(said[number] != text for number, text in texts.items())
    report(given, servers, sizes, len(said), differing)


def report(given: Any, servers: list[Served], sizes: list[float], known: int, wrong: int) -> None:
    """The table, the verdict, and the exit status."""
    names = ["asked", "answered", "left", "4xx", "5xx"]
    print("| scheme | " + " | ".join(names) + " | accepted of drafted | preempted | differing |")
    print("|---|" + "---:|" * (len(names) + 3))
    rows: list[dict[str, Any]] = []
    for served in servers:
        metrics, scheduler = served.llm.engine.metrics, served.llm.engine.scheduler
        rows.append({
            "scheme": served.scheme, **{name: served.counts[name] for name in names},
            "accepted": metrics.accepted, "drafted": metrics.drafted,
            "preempted": scheduler.num_preemptions, "differing": served.differing,
            "failed": metrics.num_failed, "drafter_errors": metrics.drafter_errors,
        })  # fmt: skip
        row = rows[-1]
        cells = [row["scheme"], *(row[name] for name in names)]
        cells += [f"{row['accepted']} of {row['drafted']}", row["preempted"], row["differing"]]
        print("| " + " | ".join(map(str, cells)) + " |")
    grown = sizes[-1] / sizes[0] - 1
    print(f"\n{known} different requests, {wrong} unlike the plain offline engine's answer")
    print("resident MiB", [round(size) for size in sizes], f"{grown:+.2%} since the first round")
    bad = [r["5xx"] + r["differing"] + r["failed"] + r["drafter_errors"] for r in rows]
    failed = bool(any(bad) or wrong or grown > 0.02)
    print("FAILED" if failed else "all well: no 5xx, no page lost")
    if given.json:
        options = {name: value for name, value in vars(given).items() if name != "json"}
        figures = {**options, "servers": rows, "resident": sizes, "grown": grown, "unlike": wrong}
        given.json.write_text(json.dumps(figures, indent=1))
    sys.exit(failed)


if __name__ == "__main__":
    main()
