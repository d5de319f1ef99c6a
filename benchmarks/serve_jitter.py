"""Inter-token latency under streaming clients, against the offline engine on the same prompts.

    python benchmarks/serve_jitter.py --clients 32 --tokens 48

Prints gaps between steps in milliseconds: of the engine alone, and as clients see them through the
server. The first steps, in which prompts are still read, are left out, and so are clients whose
answer has a token without text of its own (half an emoji): they see nothing of that step.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time

import numpy as np

from foretell.config import ServerConfig
from foretell.llm import LLM
from foretell.sequence import SamplingParams


def prompts(count: int) -> list[str]:
    return [f"Write number {i} in words, then say something about it." for i in range(count)]


def offline(llm: LLM, count: int, tokens: int) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    ids = [llm.chat_prompt([{"role": "user", "content": text}]) for text in prompts(count)]
    results = llm.generate(ids, params)
    begun = max(result.stats.first_token or 0.0 for result in results)
    return [
        gap for result in results for gap in gaps(t for t in result.stats.token_times if t >= begun)
    ]


def gaps(times) -> list[float]:
    """Between steps; tokens of one step come at one time."""
    return [b - a for a, b in itertools.pairwise(sorted(set(times)))]


async def client(port: int, text: str, tokens: int) -> list[float]:
    """Says when events came. Bare sockets: what a client costs is not the server's."""
    body = json.dumps({
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
    }).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    got: list[tuple[float, bytes]] = []
    while part := await reader.read(65536):
        got.append((time.perf_counter(), part))
    writer.close()
    assert got[0][1].startswith(b"HTTP/1.1 200"), got[0][1]
    return [when for when, part in got if b'"delta":{"content":"' in part]


async def clients(port: int, count: int, tokens: int) -> list[float]:
    times = await asyncio.gather(*(client(port, text, tokens) for text in prompts(count)))
    begun, whole = max(each[0] for each in times), [each for each in times if len(each) == tokens]
    return [gap for each in whole for gap in gaps(t for t in each if t >= begun)]


def serve(config: dict, ready, results) -> None:
    """In a process of its own: what it costs to serve is then the server's, not the clients'."""
    import threading

    from foretell.server.app import create_app
    from foretell.server.run import Server, listen

    settings = ServerConfig(port=0)
    app = create_app(LLM(**config), settings)
    with listen(settings.host, 0) as listening:
        server = Server(app, settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        ready.put(listening.getsockname()[1])
        results.get()
        server.should_exit = True
        thread.join()


def line(name: str, values: list[float]) -> np.ndarray:
    found = np.percentile(np.array(values) * 1000, [50, 90, 99])
    print(f"{name:10} p50 {found[0]:7.1f}  p90 {found[1]:7.1f}  p99 {found[2]:7.1f} ms", flush=True)
    return found


def main() -> None:
    import multiprocessing

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--speculation", default=None)
    given = parser.parse_args()
    config = {
        "speculation": given.speculation, "threads": given.threads, "max_num_seqs": given.clients,
        "max_model_len": 1024, "prefix_caching": False,
    }  # fmt: skip
    context = multiprocessing.get_context("spawn")
    ready, end = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(config, ready, end), daemon=True)
    process.start()
    port = ready.get()
    llm = LLM(**config)
    alone: list[float] = []
    served: list[float] = []
    for round_ in range(given.rounds + 1):  # turns, so that noise falls on both
        one = offline(llm, given.clients, given.tokens)
        other = asyncio.run(clients(port, given.clients, given.tokens))
        if round_:  # the first warms up
            alone += one
            served += other
    a, b = line("offline", alone), line("clients", served)
    print("ratio      " + "  ".join(f"{y / x:.2f}x" for x, y in zip(a, b, strict=True)))
    end.put(None)
    process.join(20)


if __name__ == "__main__":
    main()
