"""A server under everything at once, for minutes: does it leak, fail, or say something else?

    python benchmarks/soak.py --minutes 10 --speculation prompt-lookup:k=8

Clients ask for random lengths, whole and streamed, with grammars, go away in the middle and send
nonsense. In the end: no 5xx, every text that came whole equals the offline engine's for its seed,
all pages are free, and the process has not grown by more than 2%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import httpx2 as httpx

from foretell.config import ServerConfig
from foretell.llm import LLM
from foretell.sequence import SamplingParams
from foretell.server.app import create_app
from foretell.server.run import Server, listen

GRAMMAR = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"enum": [1, 2, 3]}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "to", "dog", "by"]


def body_of(rng: random.Random) -> dict:
    """One of a few hundred requests, so that the offline engine can answer them all in the end."""
    seed = rng.randrange(300)
    own = random.Random(seed)
    body = {
        "prompt": " ".join(own.choices(WORDS, k=own.randint(1, 120))),
        "max_tokens": own.randint(1, 60),
        "temperature": own.choice([0, 0.7, 1.0]),
        "seed": seed,
    }
    if own.random() < 0.2:
        body["grammar"] = GRAMMAR
    if own.random() < 0.2:
        body |= {"presence_penalty": 0.5, "stop": ["\n\n"]}
    return body


class Client:
    """Asks until the time is up."""

    def __init__(self, http: httpx.AsyncClient, seed: int, end: float) -> None:
        self.http, self.rng, self.end = http, random.Random(f"client {seed}"), end
        self.statuses: Counter[int | str] = Counter()
        self.texts: dict[str, str] = {}
        self.differing = 0

    async def run(self) -> None:
        while time.monotonic() < self.end:
            kind = self.rng.random()
            if kind < 0.1:
                await self.nonsense()
            elif kind < 0.25:
                await self.leave()
            else:
                await self.ask(stream=kind < 0.6)

    async def nonsense(self) -> None:
        bad = self.rng.choice(
            [{"prompt": 5}, {"prompt": "x", "n": 0}, {"prompt": "x", "grammar": "start: %%"}, [],
             {"prompt": "x " * 9000}, {"prompt": "x", "tools": []}, {"prompt": "x", "k": 1}]
        )  # fmt: skip
        answer = await self.http.post("/v1/completions", json=bad)
        self.statuses[answer.status_code] += 1
        assert answer.status_code == 400, answer.text

    async def leave(self) -> None:
        body = body_of(self.rng) | {"max_tokens": 200, "ignore_eos": True, "stream": True}
        try:
            async with asyncio.timeout(self.rng.random()):
                async with self.http.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        pass
        except TimeoutError:
            self.statuses["left"] += 1

    async def ask(self, stream: bool) -> None:
        body = body_of(self.rng)
        if self.rng.random() < 0.3:
            own = {"enabled": self.rng.random() < 0.5, "report": stream}
            body_sent = body | {"speculation": own, "stream": stream}
        else:
            body_sent = body | {"stream": stream}
        async with self.http.stream("POST", "/v1/completions", json=body_sent) as answer:
            self.statuses[answer.status_code] += 1
            raw = (await answer.aread()).decode()
        if answer.status_code == 429:
            await asyncio.sleep(0.1)
            return
        assert answer.status_code == 200, raw
        if stream:
            lines = [line[6:] for line in raw.splitlines() if line.startswith("data: {")]
            text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
        else:
            text = json.loads(raw)["choices"][0]["text"]
        known = self.texts.setdefault(json.dumps(body), text)
        self.differing += known != text


def resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


async def drive(url: str, count: int, seconds: float) -> list[Client]:
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        end = time.monotonic() + seconds
        found = [Client(http, i, end) for i in range(count)]
        await asyncio.gather(*(each.run() for each in found))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--speculation", default="prompt-lookup:k=8")
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args()
    settings = {"max_num_seqs": 16, "max_model_len": 1024, "kv_memory": "64MiB"}
    llm = LLM(given.model, speculation=given.speculation, **settings)
    app = create_app(llm, ServerConfig(port=0))
    clients: list[Client] = []
    sizes: list[float] = []
    with listen("127.0.0.1", 0) as listening:
        server = Server(app, ServerConfig())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for _ in range(5):  # the first part warms up
            clients += asyncio.run(drive(url, given.clients, given.minutes * 12))
            sizes.append(resident())
        time.sleep(1)
        engine = llm.engine
        assert not engine.has_work, "something is left behind"
        engine.check()
        free, pages = engine.cache.num_free, engine.cache.num_pages
        server.should_exit = True
        thread.join(30)
    statuses = sum((each.statuses for each in clients), Counter())
    texts = {body: text for each in clients for body, text in each.texts.items()}
    names = SamplingParams.__dataclass_fields__
    differing = sum(each.differing for each in clients)
    for body, text in texts.items():
        asked = json.loads(body)
        params = SamplingParams(**{k: v for k, v in asked.items() if k in names})
        (result,) = llm.generate(asked["prompt"], params, speculate=False)
        differing += result.text != text
    metrics = engine.metrics
    print("statuses", dict(statuses))
    print(f"{len(texts)} different requests, {differing} texts differ from the offline engine's")
    print(f"pages free {free} of {pages}; preemptions {engine.scheduler.num_preemptions}")
    print(f"accepted {metrics.accepted} of {metrics.drafted}; failed {metrics.num_failed}")
    grown = sizes[-1] / sizes[1] - 1
    print("resident MiB", [round(size) for size in sizes], f"{grown:+.1%} since the second part")
    bad = [status for status in statuses if isinstance(status, int) and status >= 500]
    wrong = bad or differing or free != pages or metrics.num_failed or grown > 0.02
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
