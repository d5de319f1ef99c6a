"""Two replicas on Ray Serve: one API, and what happens when one of them is lost or replaced.

Every wait is for something that must come, however slow the machine: pytest's timeout ends it."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from foretell.config import EngineConfig, ServerConfig
from foretell.sequence import SamplingParams
from foretell.server.replicas import choose, conversation
from foretell.server.run import listen
from tests.server import rig
from tests.server.test_errors import check

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:.*Field:DeprecationWarning"),
]

SERVER = ServerConfig(served_model_name="tiny", replicas=2, max_body="100kB", drain_timeout=900)
LONG = {"prompt": "once", "max_tokens": 120, "ignore_eos": True, "temperature": 1, "seed": 1}


def until(found: Callable[[], Any]) -> Any:
    """What is found, as soon as it is."""
    while not (it := found()):
        time.sleep(0.3)  # who looks takes time from who works
    return it


class Cluster:
    """Ray Serve with the application on it, and how to talk to it."""

    def __init__(self, url: str, engine: EngineConfig) -> None:
        self.url, self.engine = url, engine
        self.http = self.client()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=None)

    def deploy(self, engine: EngineConfig | None = None, **changes) -> None:
        from ray import serve

        from foretell.server.ray_app import application

        made = application(engine or self.engine, replace(SERVER, **changes))
        serve.run(made, name="foretell")

    def replicas(self) -> dict:
        """Actors by the name of their replica."""
        found = {}
        for each in ray.util.list_named_actors(all_namespaces=True):
            if "foretell#replica#" in each["name"]:
                with suppress(ValueError):  # it has ended meanwhile
                    found[each["name"].rpartition("#")[2]] = ray.get_actor(**each)
        return found

    def on(self, name: str, call: Callable[[Any], Any]) -> Any:
        """What a call gives on a replica's actor."""
        return ray.get(self.replicas()[name].__ray_call__.remote(call))

    def pids(self) -> set[int]:
        """Of the replicas that live."""
        found = set()
        for each in self.replicas().values():
            with suppress(ray.exceptions.RayError):
                found.add(ray.get(each.__ray_call__.remote(lambda _: os.getpid())))
        return found

    def until_there_are(self, count: int) -> None:
        def there() -> bool:
            answer = self.http.get("/health")
            return answer.status_code == 200 and answer.json()["replicas"] == count

        until(there)

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

    from foretell.server.ray_run import SETTINGS

    os.environ.update(SETTINGS)
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


def events(client: httpx.Client, begun: Callable[[], Any] = lambda: None, **body) -> list[dict]:
    """Events of a stream; the last is {} where it ended as it should.

    Args:
        begun: called when the first one has come.
    """
    found: list[dict] = []
    with client.stream("POST", "/v1/completions", json={**LONG, **body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in filter(None, answer.iter_lines()):
            text = line.removeprefix("data: ")
            found.append({} if text == "[DONE]" else json.loads(text))
            if len(found) == 1:
                begun()
    return found


def slow(actor) -> None:
    """A step takes long: what is under way on this replica stays so."""
    engine = actor._replica_impl._user_callable_wrapper._callable.llm.engine
    step = engine.step
    engine.step = lambda *given: (time.sleep(1), step(*given))[1]


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
    asked = LONG | {"stream": True, "max_tokens": 450}
    with cluster.http.stream("POST", "/v1/completions", json=asked) as answer:
        next(answer.iter_lines())
    ended = lambda: sum(cluster.value("foretell_answers_total", finish_reason="abort").values())  # noqa: E731
    until(lambda: ended() == aborted + 1)
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
        self.begun: list[int] = []  # seeds of streams of which something has come
        self.pool = ThreadPoolExecutor(clients)
        self.clients = [self.pool.submit(self._run, number) for number in range(clients)]

    def _run(self, number: int) -> None:
        with self.cluster.client() as http:
            while not self.end.is_set():
                seed = (number + len(self.whole)) % self.SEEDS
                asked = {"seed": seed, "prompt": f"once {seed}"}
                if number % 2:
                    begun = lambda seed=seed: self.begun.append(seed)  # noqa: E731
                    self.streams.append((seed, events(http, begun, **asked)))
                    continue
                answer = http.post("/v1/completions", json=LONG | asked)
                assert answer.status_code == 200, answer.text
                self.whole.append((seed, answer.json()["choices"][0]["text"]))

    def until(self, found: Callable[[], Any]) -> None:
        """As `until`, unless a client has failed."""
        until(lambda: found() or any(each.done() for each in self.clients))

    def stop(self) -> None:
        """Ends it. All that was answered is right; streams may have ended with an error."""
        self.end.set()
        for client in self.clients:
            client.result()
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
    names = dict.fromkeys(cluster.value("foretell_running_answers"), 0)
    home = lambda n: choose(conversation(json.dumps({"prompt": f"once {n}"}).encode()), names, 9)  # noqa: E731
    homes = {seed: home(seed) for seed in range(Load.SEEDS)}
    victim = homes[0]
    pid = cluster.on(victim, lambda _: os.getpid())
    cluster.on(victim, slow)
    load = Load(cluster)
    try:
        # Two minutes are left to the streams there: it is killed in the middle of them.
        load.until(lambda: any(homes[seed] == victim for seed in load.begun))
        done = len(load.whole)
        os.kill(pid, signal.SIGKILL)
        until(lambda: pid not in cluster.pids())
        cluster.until_there_are(2)  # another one has come
        load.until(lambda: len(load.whole) > done + 8)  # and what was asked since is answered
    finally:
        load.stop()
    assert 1 <= load.cut <= 8  # one of each client that streamed


def test_a_rolling_update_loses_nothing(cluster):
    cluster.until_there_are(2)
    before = cluster.pids()
    load = Load(cluster)
    try:
        load.until(lambda: load.begun and load.whole)
        cluster.deploy(max_queue=63)
        cluster.until_there_are(2)
        until(lambda: not before & cluster.pids())  # though clients went on
        done = len(load.whole) + 8, len(load.streams) + 8
        load.until(lambda: len(load.whole) > done[0] and len(load.streams) > done[1])
    finally:
        load.stop()
    assert load.cut == 0


def test_more_requests_than_run_at_once_bring_another_replica(cluster):
    cluster.deploy(cluster.engine.with_(max_num_seqs=2), replicas=1, max_replicas=2)
    try:
        cluster.until_there_are(1)
        load = Load(cluster, clients=8)
        try:
            cluster.until_there_are(2)
        finally:
            load.stop()
        assert load.cut == 0
    finally:
        cluster.deploy()


def test_an_engine_that_fails_is_replaced(cluster):
    cluster.until_there_are(2)

    def fail(actor) -> int:
        def step() -> None:
            raise SystemExit("out of luck")

        actor._replica_impl._user_callable_wrapper._callable.llm.engine.step = step
        return os.getpid()

    broken = cluster.on(next(iter(cluster.replicas())), fail)
    asked = [LONG | {"seed": n % 3, "prompt": f"{n}"} for n in range(24)]
    ask = lambda body: cluster.http.post("/v1/completions", json=body)  # noqa: E731
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, asked))
    assert [answer.status_code for answer in answers] == [200] * 24
    right = {n: text_of(n % 3, f"{n}") for n in range(24)}
    assert {n: a.json()["choices"][0]["text"] for n, a in enumerate(answers)} == right
    until(lambda: broken not in cluster.pids())
    cluster.until_there_are(2)


class Handle:
    """Of a replica's answer."""

    cancelled = False

    def __init__(self, parts: AsyncIterator[list[dict]]) -> None:
        self.parts = parts

    def __anext__(self):
        return self.parts.__anext__()

    def cancel(self) -> None:
        self.cancelled = True


START: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": []}


def passed_on(sent: list[dict], handle: Handle) -> list[dict]:
    """The messages that the router sends of those that have come, and of what follows."""
    from foretell.server.ray_app import _PassedOn

    got = []

    async def send(message):
        got.append(message)

    asyncio.run(_PassedOn(sent, handle)({}, None, send))
    return got


@pytest.mark.parametrize("end", [{}, {"more_body": False}])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_sent_behind_a_whole_answer(end, fails):
    """The server would close the connection, with the client's next request on it."""

    async def nothing():
        if fails:
            raise ray.exceptions.RayActorError
        return
        yield

    body = {"type": "http.response.body", "body": b"{}", **end}
    handle = Handle(nothing())
    assert passed_on([START, body], handle) == [START, body]
    assert handle.cancelled


@pytest.mark.parametrize("how", ["ends", "fails"])
def test_a_stream_that_stops_short_ends_with_an_error(how):
    """Whatever a replica did: a client can tell that it has not got all."""

    async def answer():
        yield [{"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True}]
        if how == "fails":
            raise ray.exceptions.RayActorError

    first = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
    handle = Handle(answer())
    got = passed_on([START, first], handle)
    *before, last = [message.get("body") for message in got]
    assert before == [None, b"data: 1\n\n", b"data: 2\n\n"]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    assert got[-1]["more_body"] is False
    assert handle.cancelled


def test_answers_that_outlast_a_shutdown_are_told_so(cluster):
    """Time is up for the replicas, and the router tells what they no longer can."""
    from ray import serve

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
        for name in cluster.replicas():
            cluster.on(name, slow)
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(ask, n) for n in range(12)]
            until(lambda: cluster.http.get("/health").json()["running"] == 12)
            serve.delete("foretell")
            assert [each.result() for each in asked] == ["replica_lost"] * 12
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


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 2)])
def test_a_replica_asks_for_what_its_ranks_need(device, gpus):
    from foretell.server.ray_app import application

    engine = EngineConfig(device=device, tensor_parallel=2, threads=3)
    router = application(engine, ServerConfig())._bound_deployment
    needs = router.init_args[0]._bound_deployment.ray_actor_options
    assert (needs["num_cpus"], needs["num_gpus"]) == (3, gpus)


def test_without_ray_the_command_says_what_to_install(monkeypatch):
    from foretell.cli import main

    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("ray_run", "ray_app"):
        monkeypatch.delitem(sys.modules, f"foretell.server.{name}", raising=False)
    said: list[str] = []
    monkeypatch.setattr(sys.stderr, "write", said.append)
    assert main(["serve", "--replicas", "2", "--model", str(rig.model().path)]) == 2
    assert "pip install 'foretell[ray]'" in "".join(said)
