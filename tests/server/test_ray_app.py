"""Two replicas on Ray Serve: one API, and what happens when one of them is lost or replaced."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pytest

from foretell.config import EngineConfig, ServerConfig
from foretell.sequence import SamplingParams
from foretell.server.run import listen
from tests.server import rig
from tests.server.test_errors import check

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*Field:DeprecationWarning"),
]

SERVER = ServerConfig(served_model_name="tiny", replicas=2, max_body="100kB", drain_timeout=20)
LONG = {"prompt": "once", "max_tokens": 450, "ignore_eos": True, "temperature": 1, "seed": 1}


class Cluster:
    """Ray Serve with the application on it, and how to talk to it."""

    def __init__(self, url: str, engine: EngineConfig) -> None:
        self.url, self.engine = url, engine
        self.http = self.client()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)

    def deploy(self, **changes) -> None:
        from ray import serve

        from foretell.server.ray_app import application

        serve.run(application(self.engine, replace(SERVER, **changes)), name="foretell")

    def replicas(self) -> dict:
        """Actors by the name of their replica."""
        all_of_them = ray.util.list_named_actors(all_namespaces=True)
        return {
            each["name"].rpartition("#")[2]: ray.get_actor(**each)
            for each in all_of_them
            if "foretell#replica#" in each["name"]
        }

    def pid(self, replica) -> int:
        return ray.get(replica.__ray_call__.remote(lambda _: os.getpid()))

    def pids(self) -> set[int]:
        return {self.pid(each) for each in self.replicas().values()}

    def until_there_are(self, count: int) -> None:
        for _ in range(600):
            answer = self.http.get("/health")
            if answer.status_code == 200 and answer.json()["replicas"] == count:
                return
            time.sleep(0.1)
        raise AssertionError("the replicas do not come")

    def value(self, name: str, **labels) -> dict[str, float]:
        """A metric of each replica."""
        found = {}
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                found[line.partition('replica="')[2].partition('"')[0]] = float(line.split()[-1])
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    from ray import serve

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    root = str(Path(__file__).parents[2])
    paths = {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    ray.init(
        address="local", num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False,
        log_to_driver=False, runtime_env={"env_vars": paths},
    )  # fmt: skip
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    engine = EngineConfig(
        model=str(rig.model().path), weights="f32", page_size=4, kv_memory="8MiB", threads=1
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        made = Cluster(f"http://127.0.0.1:{port}", engine)
        made.deploy()
        yield made
    finally:
        serve.shutdown()
        ray.shutdown()


def text_of(seed: int, prompt: str = LONG["prompt"]) -> str:
    params = SamplingParams(
        temperature=1, seed=seed, max_tokens=LONG["max_tokens"], ignore_eos=True
    )
    return rig.llm().generate(prompt, params)[0].text


def events(client: httpx.Client, **body) -> list[dict]:
    """Events of a stream; the last is {} where it ended as it should."""
    with client.stream("POST", "/v1/completions", json={**LONG, **body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [{} if line == "[DONE]" else json.loads(line) for line in lines]


def joined(parts: list[dict]) -> str:
    return "".join(part["choices"][0]["text"] for part in parts if part.get("choices"))


def test_it_is_the_api_of_one_server(cluster):
    expected = text_of(3)
    answer = cluster.http.post("/v1/completions", json=LONG | {"seed": 3})
    assert answer.json()["choices"][0]["text"] == expected
    parts = events(cluster.http, seed=3)
    assert parts[-1] == {}
    assert joined(parts) == expected
    assert len(parts) > 10  # it came in parts
    named = cluster.http.get("/v1/models", headers={"X-Request-Id": "mine"})
    assert named.json()["data"][0]["id"] == "tiny"
    assert named.headers.get_list("x-request-id") == ["mine"]
    assert cluster.http.get("/").headers["content-type"].startswith("text/html")
    tokens = cluster.http.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
    assert cluster.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "abc"


def test_errors_are_those_of_one_server(cluster):
    post = cluster.http.post
    check(post("/v1/completions", json=LONG | {"top_p": 2}), 400, param="top_p")
    check(post("/v1/completions", content=b"{"), 400, code="invalid_json")
    check(post("/v1/completions", content=b"x" * 200_000), 413, code="body_too_large")
    check(post("/v1/completions", content=iter([b"x" * 60_000] * 3)), 413)
    check(post("/v1/completions", json=LONG | {"model": "other"}), 404, code="model_not_found")
    check(cluster.http.get("/nowhere"), 404, code="not_found")
    check(cluster.http.delete("/v1/models"), 405, code="method_not_allowed")


def test_a_conversation_finds_its_pages(cluster):
    body = {"messages": [{"role": "user", "content": "a long story about " * 5}], "max_tokens": 8}
    usage = []
    for _ in range(4):
        answer = cluster.http.post("/v1/chat/completions", json=body).json()
        usage.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        body["messages"] += [answer["choices"][0]["message"], {"role": "user", "content": "on!"}]
        for message in body["messages"]:
            message.pop("refusal", None)
    assert usage[0] == 0
    assert all(cached > 50 for cached in usage[1:])


def test_both_replicas_work(cluster):
    before = cluster.value("foretell_generated_tokens_total")
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: events(cluster.http, prompt=f"{n}"), range(32)))
    after = cluster.value("foretell_generated_tokens_total")
    assert len(before) == len(after) == 2
    gained = sorted(after[name] - before[name] for name in after)
    assert sum(gained) == 32 * LONG["max_tokens"]
    assert gained[0] > 5 * LONG["max_tokens"]


def test_a_client_that_goes_away_ends_its_answer(cluster):
    aborted = sum(cluster.value("foretell_answers_total", finish_reason="abort").values())
    with cluster.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        next(answer.iter_lines())
    for _ in range(200):
        now = sum(cluster.value("foretell_answers_total", finish_reason="abort").values())
        if now == aborted + 1:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the answer was not ended")
    health = cluster.http.get("/health").json()
    assert health["running"] == 0
    assert health["kv_pages"] == health["kv_pages_free"]


class Load:
    """Clients that ask, half of them for streams, until they are told to stop."""

    SEEDS = 8  # and prompts: conversations of their own

    def __init__(self, cluster: Cluster, clients: int = 16) -> None:
        self.cluster = cluster
        self.end = threading.Event()
        self.whole: list[tuple[int, str]] = []  # seeds and what was answered
        self.streams: list[tuple[int, list[dict]]] = []
        self.pool = ThreadPoolExecutor(clients)
        self.clients = [self.pool.submit(self._run, number) for number in range(clients)]

    def _run(self, number: int) -> None:
        with self.cluster.client() as http:
            while not self.end.is_set():
                seed = (number + len(self.whole)) % self.SEEDS
                asked = {"seed": seed, "prompt": f"once {seed}"}
                if number % 2:
                    self.streams.append((seed, events(http, **asked)))
                    continue
                answer = http.post("/v1/completions", json=LONG | asked)
                assert answer.status_code == 200, answer.text
                self.whole.append((seed, answer.json()["choices"][0]["text"]))

    def stop(self) -> None:
        """Ends it. All that was answered is right; streams may have ended with an error."""
        self.end.set()
        for client in self.clients:
            client.result(120)
        right = [text_of(seed, f"once {seed}") for seed in range(self.SEEDS)]
        assert all(text == right[seed] for seed, text in self.whole)
        for seed, parts in self.streams:
            ended = parts[-1] == {}
            assert right[seed] == joined(parts) if ended else right[seed].startswith(joined(parts))
            if not ended:
                assert parts[-1]["error"]["code"] == "replica_lost", parts[-1]

    @property
    def cut(self) -> int:
        return sum(parts[-1] != {} for _, parts in self.streams)


def test_a_replica_that_is_killed_costs_its_streams_alone(cluster):
    cluster.until_there_are(2)
    load = Load(cluster)
    try:
        time.sleep(1)
        running = cluster.value("foretell_running_answers")
        victim = max(running, key=running.__getitem__)
        os.kill(cluster.pid(cluster.replicas()[victim]), signal.SIGKILL)
        time.sleep(1)
        done = len(load.whole)
        cluster.until_there_are(2)  # another one has come
        time.sleep(0.5)
    finally:
        load.stop()
    assert len(load.whole) > done  # it went on
    assert 1 <= load.cut <= 8  # one of each client that streamed


def test_a_rolling_update_loses_nothing(cluster):
    cluster.until_there_are(2)
    before = cluster.pids()
    load = Load(cluster)
    try:
        time.sleep(0.5)
        cluster.deploy(max_queue=63)
        cluster.until_there_are(2)
        time.sleep(0.5)
    finally:
        load.stop()
    assert load.cut == 0
    assert not before & cluster.pids()
    assert len(load.whole) > 8
    assert len(load.streams) > 8


def test_an_engine_that_fails_is_replaced(cluster):
    cluster.until_there_are(2)

    def fail(actor) -> int:
        def step() -> None:
            raise SystemExit("out of luck")

        actor._replica_impl._user_callable_wrapper._callable.llm.engine.step = step
        return os.getpid()

    broken = ray.get(next(iter(cluster.replicas().values())).__ray_call__.remote(fail))
    asked = [LONG | {"seed": n % 3, "prompt": f"{n}"} for n in range(24)]
    ask = lambda body: cluster.http.post("/v1/completions", json=body)  # noqa: E731
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, asked))
    assert [answer.status_code for answer in answers] == [200] * 24
    cluster.until_there_are(2)
    assert broken not in cluster.pids()


@pytest.mark.parametrize("how", ["ends", "fails"])
def test_a_stream_that_stops_short_ends_with_an_error(how):
    """Whatever a replica did: a client can tell that it has not got all."""
    from foretell.server.ray_app import _PassedOn

    async def answer():
        yield [{"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True}]
        if how == "fails":
            raise ray.exceptions.RayActorError

    got = []

    async def send(message):
        got.append(message)

    class Handle:
        cancelled = False

        def __init__(self):
            self.parts = answer()

        def __anext__(self):
            return self.parts.__anext__()

        def cancel(self):
            self.cancelled = True

    sent = [
        {"type": "http.response.start", "status": 200, "headers": []},
        {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True},
    ]
    handle = Handle()
    asyncio.run(_PassedOn(sent, handle)({}, None, send))
    *before, last = [message.get("body") for message in got]
    assert before == [None, b"data: 1\n\n", b"data: 2\n\n"]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    assert got[-1]["more_body"] is False
    assert handle.cancelled


def test_answers_that_outlast_a_shutdown_are_told_so(cluster):
    """Time is up for the replicas, and the router tells what they no longer can."""
    from ray import serve

    def slow(actor) -> None:
        engine = actor._replica_impl._user_callable_wrapper._callable.llm.engine
        step = engine.step
        engine.step = lambda *given: (time.sleep(0.2), step(*given))[1]

    def ask(n: int) -> str:
        """The code of the error that an answer ends with."""
        asked = LONG | {"prompt": f"{n}", "stream": n % 3 > 0}
        with cluster.http.stream("POST", "/v1/completions", json=asked) as answer:
            *_, last = [line for line in answer.iter_lines() if line]
        begun = answer.status_code == 200
        assert begun or answer.status_code == 503
        return json.loads(last.removeprefix("data: ") if begun else last)["error"]["code"]

    cluster.deploy(drain_timeout=1)
    cluster.until_there_are(2)
    try:
        for replica in cluster.replicas().values():
            ray.get(replica.__ray_call__.remote(slow))
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(ask, n) for n in range(12)]
            for _ in range(300):
                if cluster.http.get("/health").json()["running"] == 12:
                    break
                time.sleep(0.1)
            serve.delete("foretell")
            assert [each.result(60) for each in asked] == ["replica_lost"] * 12
    finally:
        cluster.deploy()


def test_the_kuberay_example_builds_the_application():
    import yaml
    from ray.serve.schema import ServeDeploySchema

    text = (Path(__file__).parents[2] / "docs/scale_out.md").read_text()
    service = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (app,) = config.applications
    module, _, name = app.import_path.partition(":")
    build = getattr(importlib.import_module(module), name)
    bound = build(app.args)._bound_deployment
    assert bound.name == "router"
    replica = bound.init_args[0]._bound_deployment
    assert replica.init_args[0].threads == 8
    scaled = replica._deployment_config.autoscaling_config
    assert (scaled.min_replicas, scaled.max_replicas) == (2, 8)
    with pytest.raises(ValueError, match="modle: there is no such option"):
        build({"modle": "x"})


def test_without_ray_the_command_says_what_to_install(monkeypatch):
    from foretell.cli import main

    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("ray_run", "ray_app"):
        monkeypatch.delitem(sys.modules, f"foretell.server.{name}", raising=False)
    said: list[str] = []
    monkeypatch.setattr(sys.stderr, "write", said.append)
    assert main(["serve", "--replicas", "2", "--model", str(rig.model().path)]) == 2
    assert "pip install 'foretell[ray]'" in "".join(said)
