"""Which replica gets a request, how many there should be, and what is said of all together."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foretell.config import ServerConfig
from foretell.server import replicas

NAMES = ["a", "b", "c"]


def key(**body) -> str | None:
    return replicas.conversation(json.dumps(body).encode())


def chat(*texts: str) -> list[dict]:
    roles = ["system", *["user", "assistant"] * len(texts)]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def test_turns_of_a_conversation_have_one_key():
    first = key(messages=chat("be kind", "hello"), temperature=0.5)
    assert first == key(messages=chat("be kind", "hello", "hi", "and then?"), stream=True)
    assert first != key(messages=chat("be kind", "goodbye"))
    assert first != key(messages=chat("be rude", "hello"))
    assert first != key(messages=chat("be kind", "hello"), tools=[{"type": "function"}])


def test_prompts_are_told_apart_by_how_they_begin():
    long = "x" * 5000
    assert key(prompt=long + "1") == key(prompt=long + "2") != key(prompt="1" + long)
    assert key(prompt=[1] * 5000 + [2]) == key(prompt=[1] * 5000 + [3]) != key(prompt=[2, 1])
    assert key(prompt=["one", "two"]) == key(prompt=["one"]) != key(prompt=["two"])


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'"x"', b"{}", b'{"messages": [3]}', b'{"messages": [{}]}',
     b'{"prompt": []}', b'{"prompt": null}', b'{"prompt": [null]}', b"\xff", b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_conversation_does_no_harm(body):
    assert replicas.conversation(body) in (None, replicas.conversation(b'{"prompt": [null]}'))


def test_a_conversation_stays_where_its_pages_are():
    for n in range(50):
        home = replicas.choose(f"talk {n}", dict.fromkeys(NAMES, 0), 4)
        assert replicas.choose(f"talk {n}", {name: 4 * (name == home) for name in NAMES}, 4) == home
        away = replicas.choose(f"talk {n}", {name: 5 * (name == home) for name in NAMES}, 4)
        assert away != home
        others = {name: 0 for name in NAMES if name != away}  # a replica that is not its home ends
        assert replicas.choose(f"talk {n}", others, 4) == home


def test_conversations_spread_over_all():
    homes = [replicas.choose(f"talk {n}", dict.fromkeys(NAMES, 0), 4) for n in range(600)]
    assert all(150 < homes.count(name) < 250 for name in NAMES)


def test_without_a_conversation_the_least_loaded_is_chosen():
    assert replicas.choose(None, {"a": 2, "b": 1, "c": 3}, 4) == "b"


def test_replicas_are_wanted_for_requests_and_for_pages():
    assert replicas.wanted(2, 16, 16, [0.1, 0.1]) == 1
    assert replicas.wanted(2, 48, 16, [0.1, 0.1]) == 3
    assert replicas.wanted(2, 10, 16, [1.0, 1.0]) == pytest.approx(2.5)
    assert replicas.wanted(0, 0, 16, []) == 0


def test_metrics_of_all_replicas_are_one_text():
    text = '# HELP x_total Xs.\n# TYPE x_total counter\nx_total{kind="a b"} 1.0\n# HELP y Y.\n' \
           "# TYPE y gauge\ny 2.0\n"  # fmt: skip
    joint = replicas.joint_metrics({"r1": text, "r2": text.replace("2.0", "3.0")})
    x, y = text_string_to_metric_families(joint)
    assert [(s.labels, s.value) for s in y.samples] == [
        ({"replica": "r1"}, 2.0),
        ({"replica": "r2"}, 3.0),
    ]
    assert [s.labels for s in x.samples] == [
        {"kind": "a b", "replica": name} for name in ("r1", "r2")
    ]
    assert joint.count("# TYPE x_total") == 1


def test_health_is_summed_up():
    one = {"status": "ok", "running": 1, "waiting": 2, "kv_pages": 8, "kv_pages_free": 4}
    both = {"status": "ok", "replicas": 2, "running": 2, "waiting": 4, "kv_pages": 16}
    assert replicas.joint_health([one, one]) == both | {"kv_pages_free": 8}


def test_numbers_of_replicas_are_checked():
    with pytest.raises(ValueError, match="replicas=0: must be at least 1"):
        ServerConfig(replicas=0)
    with pytest.raises(ValueError, match="max_replicas=2: must be at least replicas=3"):
        ServerConfig(replicas=3, max_replicas=2)
