"""Limits, disconnects, crashes and the end: what a server does on a bad day."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx2 as httpx
import pytest

from foretell.engine.detokenize import Detokenizer
from foretell.models.grammar import Grammars
from foretell.runtime.ranks import RankError
from foretell.sequence import SamplingParams
from foretell.server import bridge, guard, run
from foretell.server.guard import JsonLines
from tests.server import rig
from tests.server.test_errors import check

LONG = {"prompt": "once", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@contextmanager
def slow(server, pause=0.01):
    """Steps that last, so that there is time to act between them."""
    real = server.llm.engine.step

    def step():
        time.sleep(pause)
        return real()

    server.llm.engine.step = step
    yield
    server.llm.engine.step = real


def until(condition):
    for _ in range(60_000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never came to that")


def goes_away(server, body):
    """A client that leaves after a stream's first line, or does not wait for a whole answer."""
    patience = 30 if body["stream"] else 0.3
    with httpx.Client(base_url=server.url, timeout=httpx.Timeout(30, read=patience)) as client:
        if body["stream"]:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body)


def test_the_key_is_asked_for():
    with rig.running(api_key="secret") as server:
        check(server.http.get("/v1/models"), 401, code="invalid_api_key")
        check(server.http.get("/metrics"), 401)
        check(server.post("/v1/completions", prompt="x"), 401)
        wrong = {"Authorization": "Bearer secreT"}
        assert server.http.get("/v1/models", headers=wrong).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert server.http.get("/v1/models", headers=right).status_code == 200
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/").status_code == 200


def test_no_other_origin_may_read_unless_it_is_named():
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with rig.running() as server:
        answer = server.http.get("/v1/models", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in answer.headers
        assert server.http.options("/v1/models", headers=asked).status_code == 405
    with rig.running(api_key="k", cors_origins=["https://a.example"]) as server:
        answer = server.http.options("/v1/completions", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = server.http.options("/v1/models", headers=asked | {"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_name_that_was_made_to_point_here_is_turned_away():
    def asks(server, host: str) -> int:
        return server.http.get("/v1/models", headers={"Host": host}).status_code

    names = ("localhost", "localhost:8000", "127.0.0.1", "127.0.0.1:9", "[::1]:8000", "127.9.9.9")
    others = ("evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "[::")
    with rig.running() as server:
        assert [asks(server, name) for name in names] == [200] * len(names)
        assert [asks(server, name) for name in others] == [403] * len(others)
        check(server.http.get("/", headers={"Host": "a.example"}), 403, code="unknown_host")
    with rig.running(api_key="k") as server:  # who knows the key may call it what he likes
        headers = {"Host": "model.example", "Authorization": "Bearer k"}
        assert server.http.get("/v1/models", headers=headers).status_code == 200
    with rig.running(host="0.0.0.0") as server:
        assert asks(server, "model.example") == 200


def test_bodies_have_a_limit():
    with rig.running(max_body="10kB") as server:
        check(server.post("/v1/completions", prompt="x" * 20_000), 413)

        def chunks():  # no Content-Length
            yield b'{"prompt": "'
            for _ in range(50):
                yield b"x" * 1000
            yield b'"}'

        headers = {"Content-Type": "application/json"}
        answer = server.http.post("/v1/completions", content=chunks(), headers=headers)
        check(answer, 413)
        server.complete(prompt="x", max_tokens=2)


@contextmanager
def connected(server):
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 30) as client:
        yield client


def drip(client, byte: bytes) -> bytes:
    """Sends a byte again and again, until the server has had enough; what it said to that."""
    told = b""
    client.settimeout(0.02)
    for _ in range(1000):
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(byte)
        try:
            if not (part := client.recv(4096)):
                return told
            told += part
        except TimeoutError:
            continue
        except ConnectionResetError:
            return told
    raise AssertionError("the server waits for ever")


def test_a_head_that_never_ends_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(run, "HEAD_TIMEOUT", 0.3)
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    with rig.running() as server:
        for begin, byte in (
            (b"", b""),
            (b"G", b""),
            (head, b"x"),
            (head + b"\r\n" + head, b"x"),
        ):
            with connected(server) as client:
                client.sendall(begin)
                told = drip(client, byte)
            assert told.count(b"HTTP/1.1 200") == begin.count(b"\r\n\r\n")
        with slow(server, 0.05):  # nobody is hurried who has asked, however long the answer takes
            server.complete(**LONG | {"max_tokens": 20, "speculation": {"enabled": False}})


def test_a_body_that_never_ends_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(guard, "BODY_TIMEOUT", 0.3)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    with rig.running() as server:
        for byte in (b"", b" "):  # none comes, or they come one by one
            with connected(server) as client:
                client.sendall(head.replace("50", "9999").encode() + b'{"prompt": ')
                told = drip(client, byte)
            assert told.startswith(b"HTTP/1.1 408"), told
            assert b"did not come to its end" in told
        # Nobody is hurried who has said all, however long the answer takes.
        with slow(server, 0.05):
            server.complete(**LONG | {"max_tokens": 20, "speculation": {"enabled": False}})


def test_a_full_queue_is_told_when_to_come_back():
    engine = rig.llm(max_num_seqs=1)
    with rig.running(engine=engine, max_queue=1) as server, slow(server):
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(server.complete, **LONG | {"max_tokens": 60}) for _ in range(2)]
            until(lambda: server.http.get("/health").json()["waiting"] == 1)
            refused = server.post("/v1/completions", **LONG)
            check(refused, 429, code="queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            many = server.post("/v1/completions", **LONG, n=3)
            check(many, 400, "n")
            texts = {future.result()["choices"][0]["text"] for future in asked}
            assert len(texts) == 1
        server.complete(prompt="x", max_tokens=2)
        server.wait_idle()


def test_a_grammar_that_is_long_to_read_holds_up_nobody(monkeypatch):
    gate, real = threading.Event(), Grammars.make

    def make(self, text):
        assert gate.wait(60)
        return real(self, text)

    monkeypatch.setattr(Grammars, "make", make)
    with rig.running() as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.complete, prompt="x", grammar='start: "the"')
        for _ in range(3):
            server.complete(prompt="x", max_tokens=5)
            server.stream("/v1/completions", prompt="x", max_tokens=5)
        assert not asked.done()
        gate.set()
        assert asked.result()["choices"][0]["text"] == "the"


@pytest.mark.parametrize("stream", [False, True])
def test_time_is_up(stream):
    with rig.running(None, request_timeout=2) as server, slow(server):
        if not stream:
            check(server.post("/v1/completions", **LONG), 504, code="timeout")
        else:
            with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as got:
                lines = [line for line in got.iter_lines() if line]
            assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
            assert len(lines) > 2
        server.wait_idle()


@pytest.mark.parametrize("scheme", [None, rig.LOOKUP, "draft-model:weights=target,k=3"])
def test_a_client_that_goes_away_frees_its_pages(scheme):
    with rig.running(scheme) as server, slow(server):
        engine = server.llm.engine
        for stream in (True, False):
            body = LONG | {"stream": stream, "n": 2}
            other = ThreadPoolExecutor(1)
            stays = other.submit(server.complete, prompt="stays", max_tokens=100, temperature=0)
            until(lambda: engine.scheduler.running)
            goes_away(server, body)
            steps = engine.metrics.num_steps
            until(lambda: len(engine.scheduler.running) <= 1)
            assert engine.metrics.num_steps - steps < 100
            (expected,) = rig.llm().generate("stays", SamplingParams(max_tokens=100, temperature=0))
            assert stays.result()["choices"][0]["text"] == expected.text
            server.wait_idle()
        assert server.app.state.service.bridge.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_computed_for_a_client_that_is_gone(stream, monkeypatch):
    with rig.running() as server, slow(server):
        engine, bridge = server.llm.engine, server.app.state.service.bridge
        left: list[int] = []
        leave = bridge.leave

        def watched(flight):
            left.append(engine.metrics.num_steps)
            leave(flight)

        monkeypatch.setattr(bridge, "leave", watched)
        goes_away(server, LONG | {"stream": stream})
        until(lambda: not engine.has_work)
        assert len(left) == 1
        assert engine.metrics.num_steps - left[0] <= 1, "the step in progress, no other"
        assert engine.metrics.num_steps < 300
        server.wait_idle()


def test_a_client_that_leaves_the_queue_is_forgotten():
    engine = rig.llm(max_num_seqs=1)
    with rig.running(engine=engine) as server, slow(server):
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(server.complete, **LONG | {"max_tokens": 150})
            until(lambda: engine.engine.scheduler.running)
            hasty = httpx.Timeout(60, read=0.1)
            with httpx.Client(base_url=server.url, timeout=hasty) as client:
                for stream in (True, False):
                    with pytest.raises(httpx.ReadTimeout):  # events start with what is said
                        client.post("/v1/completions", json=LONG | {"stream": stream})
            until(lambda: not engine.engine.scheduler.waiting)
            assert engine.engine.scheduler.running, "the first one goes on"
            assert first.result()["usage"]["completion_tokens"] == 150
        server.wait_idle()


def test_a_client_that_reads_nothing_loses_its_place():
    with rig.running(None, request_timeout=6) as server:
        body = LONG | {"n": 16, "logprobs": 20, "stream": True}  # more than sockets hold
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            client.sendall(head.encode() + content)
            bridge = server.app.state.service.bridge
            until(lambda: bridge.num_open == 16)
            until(lambda: bridge.num_open == 0)
        server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_one_request_that_crashes_leaves_the_others_alone(stream, monkeypatch):
    real = Detokenizer.push

    def push(self, token):
        if self.stop == ("crash",) and self.num_tokens == 5:
            raise RuntimeError("scripted")
        return real(self, token)

    monkeypatch.setattr(Detokenizer, "push", push)
    with rig.running() as server, slow(server, 0.002), ThreadPoolExecutor(4) as pool:
        body = {"max_tokens": 60, "temperature": 0}
        asked = [pool.submit(server.complete, prompt=f"good {i}", **body) for i in range(3)]
        bad = body | {"prompt": "bad", "stop": "crash", "ignore_eos": True}
        if stream:
            with server.http.stream("POST", "/v1/completions", json=bad | {"stream": True}) as got:
                lines = [line.removeprefix("data: ") for line in got.iter_lines() if line]
            error = json.loads(lines[-1])["error"]
            assert error["type"] == "server_error"
        else:
            check(server.post("/v1/completions", **bad), 500, code="answer_failed")
        for i, future in enumerate(asked):
            (expected,) = rig.llm().generate(f"good {i}", SamplingParams(**body))
            assert future.result()["choices"][0]["text"] == expected.text
        server.wait_idle()


def test_a_pass_that_fails_once_is_repeated_and_twice_ends_what_runs(monkeypatch):
    with rig.running() as server:
        runtime = server.llm.engine.runtime
        real, left = runtime.forward_target, [0]

        def forward(rows):
            if left[0]:
                left[0] -= 1
                raise RuntimeError("scripted")
            return real(rows)

        monkeypatch.setattr(runtime, "forward_target", forward)
        expected = server.complete(prompt="x", max_tokens=8, temperature=0)["choices"]
        left[0] = 1
        assert server.complete(prompt="x", max_tokens=8, temperature=0)["choices"] == expected
        left[0] = 2
        check(server.post("/v1/completions", prompt="x", max_tokens=8), 500)
        assert server.complete(prompt="x", max_tokens=8, temperature=0)["choices"] == expected
        server.wait_idle()


def test_an_engine_that_died_says_so(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    with rig.running() as server:

        def die():
            raise SystemExit

        server.llm.engine.step = die
        check(server.post("/v1/completions", prompt="x"), 503)
        check(server.post("/v1/completions", prompt="x"), 503, code="unavailable")
        assert server.http.get("/health").status_code == 503


def test_a_lost_rank_ends_the_engine_and_is_named(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    with rig.running() as server:

        def lose():
            raise RankError("rank 1 has ended by SIGKILL")

        server.llm.engine.step = lose
        for _ in range(2):
            answer = server.post("/v1/completions", prompt="x")
            assert answer.status_code == 503
            assert "rank 1 has ended by SIGKILL" in answer.json()["error"]["message"]
        assert server.http.get("/health").status_code == 503


def test_answers_in_progress_are_finished_before_the_end():
    with rig.running() as server, slow(server):
        body = LONG | {"max_tokens": 80}
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(server.complete, **body)
            events = pool.submit(server.stream, "/v1/completions", **body)
            until(lambda: len(server.llm.engine.scheduler.running) == 2)
            server.server.should_exit = True
            text = whole.result()["choices"][0]["text"]
            assert "".join(e["choices"][0]["text"] for e in events.result()) == text
        server.thread.join(120)
        assert not server.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")


@pytest.mark.parametrize("rest", [0.01, 1e6])
def test_what_was_learnt_of_drafts_outlasts_the_server(rest, tmp_path, monkeypatch):
    """Kept whenever it rests, as it may be killed; and in the end."""
    monkeypatch.setattr("foretell.engine.kept.home", lambda: tmp_path)
    monkeypatch.setattr(bridge, "REST", rest)
    kept = tmp_path / "acceptance"
    with rig.running(engine=rig.llm(rig.LOOKUP + ",adaptive=true")) as server:
        server.complete(prompt="the thing in the thing in the", max_tokens=30)
        if rest < 1:
            until(lambda: kept.exists() and list(kept.glob("*.json")))
        else:
            assert not kept.exists()
    [path] = kept.glob("*.json")
    assert json.loads(path.read_text())[0]["asked"] > 0


def test_the_end_does_not_wait_for_ever():
    with (
        rig.running(drain_timeout=1) as server,
        slow(server, 0.05),
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(server.post, "/v1/completions", **LONG)
        until(lambda: server.llm.engine.scheduler.running)
        server.server.should_exit = True
        server.thread.join(120)
        assert not server.thread.is_alive()
        check(asked.result(), 503, code="unavailable")


def test_loggers_have_sensible_names():
    for name, told in {"uvicorn.error": "uvicorn", "foretell.server": "foretell.server"}.items():
        record = logging.LogRecord(name, logging.INFO, "x.py", 1, "started %d", (3,), None)
        line = json.loads(JsonLines().format(record))
        assert (line["logger"], line["message"], line["level"]) == (told, "started 3", "info")


def test_every_request_leaves_one_line_with_its_id(caplog):
    caplog.set_level(logging.INFO, "foretell.server.requests")
    with rig.running() as server:
        headers = {"X-Request-Id": "my-own.id"}
        answer = server.http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True},
            headers=headers,
        )  # fmt: skip
        assert answer.headers["x-request-id"] == "my-own.id"
        odd = server.http.get("/health", headers={"X-Request-Id": "no good\tone"})
        assert odd.headers["x-request-id"] != "no good\tone"
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    (line,) = [line for line in lines if line.get("request_id") == "my-own.id"]
    assert line["status"] == 200
    assert line["path"] == "/v1/completions"
    assert line["completion_tokens"] == 3
    assert line["finish_reasons"] == ["length"]
