"""The command line: its flags are the configuration's fields, mistakes get one line."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import foretell
from foretell import terminal
from foretell.bench import command
from foretell.bench.certify_config import CertifyConfig
from foretell.bench.run import BenchConfig
from foretell.cli import main
from foretell.config import EngineConfig
from foretell.flags import field_docs
from foretell.models.checkpoint import Checkpoint
from foretell.sequence import SamplingParams, Stats
from foretell.terminal import Origins, Screen, stats_line
from tests import heads, tiny

TEMPLATE = "{% for m in messages %}{{ m.role[0] }} {{ m.content }}\n{% endfor %}a "
SMALL = ["--weights=f32", "--kv-memory=8MiB", "--max-model-len=256", "--threads=1"]
GREEDY = ["--temperature=0", "--max-tokens=24", "--ignore-eos"]
LOOKUP = "--speculation=prompt-lookup:k=4,adaptive=false"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model whose tokens are letters."""
    path = tiny.write_model(tmp_path_factory.mktemp("model"))
    tiny.write_tokenizer(path, TEMPLATE)
    return str(path)


@pytest.fixture
def run(model, capsys):
    """Runs a command over the tiny model; gives status, stdout, stderr."""

    def command(name, *arguments):
        status = main([name, f"--model={model}", *SMALL, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


def say(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# ---- flags

OWN = {"bench": ["prefix_caching"], "certify": ["prefix_caching", "max_num_seqs", "crossed"]}
"""What these commands decide about themselves."""


@pytest.mark.parametrize(
    ("command", "configs"),
    [
        ("generate", [EngineConfig, SamplingParams]),
        ("bench", [EngineConfig, BenchConfig]),
        ("certify", [EngineConfig, CertifyConfig]),
        ("demo", [EngineConfig]),
    ],
)
def test_every_field_is_a_flag_with_its_doc(command, configs, capsys, monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    monkeypatch.setenv("COLUMNS", "400")
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for config in configs:
        for field in dataclasses.fields(config):
            if field.name in OWN.get(command, ()):
                continue
            assert f"--{field.name.replace('_', '-')}" in text
            if field.name != "speculation":
                assert field_docs(config)[field.name][:40] in text, field.name


COMMANDS = [None, "generate", "chat", "bench", "advise", "certify", "pull", "demo"]


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_cuts_nothing(width, command, capsys, monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([command, "--help"] if command else ["--help"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    if command in ("generate", "chat"):
        for config in (EngineConfig, SamplingParams):
            for name, doc in field_docs(config).items():
                if command == "generate" or f"--{name.replace('_', '-')} " in words:
                    assert f"--{name.replace('_', '-')}" in words
                    assert doc.replace("- ", "-") in words.replace("- ", "-"), name
    elif not command:
        assert "..." not in words.replace("[ARGS]...", "")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{foretell.__version__}\n"


def test_every_field_has_a_doc():
    for config in (EngineConfig, SamplingParams, BenchConfig, CertifyConfig):
        names = {field.name for field in dataclasses.fields(config)}
        assert names == {name for name, doc in field_docs(config).items() if doc}


def test_what_was_learnt_of_drafts_is_kept_for_the_next_command(run, tmp_path, monkeypatch):
    monkeypatch.setattr("foretell.engine.kept.home", lambda: tmp_path)
    lookup = "--speculation=prompt-lookup:k=4"
    _, before, _ = run("generate", "--raw", "abcabc", "--json", *GREEDY, lookup)
    [path] = (tmp_path / "acceptance").iterdir()
    kept = json.loads(path.read_text())
    assert kept[0]["asked"] > 0
    path.write_text(json.dumps([kept[0] | {"asked": 30.0, "found": 30.0}]))
    _, after, _ = run("generate", "--raw", "abcabc", "--json", *GREEDY, lookup)
    assert json.loads(after)["token_ids"] == json.loads(before)["token_ids"]
    assert json.loads(path.read_text())[0]["asked"] > 25, "it went on from there"


def test_flags_reach_the_sampling(run):
    ids = "--json"
    _, out, _ = run("generate", "--raw", "abcabc", ids, *GREEDY, "--max-tokens=5", "--logprobs=2")
    one = json.loads(out)
    assert len(one["token_ids"]) == 5
    assert len(one["logprobs"]) == 5
    assert len(one["logprobs"][0]["top"]) == 2
    assert one["finish_reason"] == "length"
    banned = [f"--bad-token-ids={token}" for token in set(one["token_ids"])]
    _, out, _ = run("generate", "--raw", "abcabc", ids, *GREEDY, "--max-tokens=5", *banned)
    assert not set(json.loads(out)["token_ids"]) & set(one["token_ids"])
    _, out, _ = run("generate", "--raw", "abcabc", ids, *GREEDY, "--logit-bias=7=1000")
    assert set(json.loads(out)["token_ids"]) == {7}
    assert len(json.loads(out)["token_ids"]) == 24
    _, out, _ = run("generate", "--raw", "abcabc", ids, "--max-tokens=none", "--ignore-eos")
    assert len(json.loads(out)["token_ids"]) == 256 - 6


# ---- generate


def test_speculation_does_not_change_what_is_printed(run):
    plain = run("generate", "abcabcabc", *GREEDY)
    speculative = run("generate", "abcabcabc", *GREEDY, LOOKUP, "--stats")
    assert plain[0] == speculative[0] == 0
    assert plain[1] == speculative[1]
    assert len(plain[1]) == 25
    assert "tok/s" in speculative[2]


@pytest.mark.parametrize("kind", heads.KINDS)
def test_a_head_from_disk_does_not_change_it_either(kind, run):
    plain = run("generate", "abc", *GREEDY)
    scheme = f"--speculation={heads.scheme(kind)},depth=5,topk=4,nodes=24,adaptive=false"
    status, out, err = run("generate", "abc", *GREEDY, scheme, "--stats")
    assert (status, out) == plain[:2]
    assert re.search(r"accepted \d+ of \d{3} drafted", err), err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("depth=0,topk=0", "topk=0: must be from 1 to 63"),
        ("depth=64", "depth=64"),
        ("depth=five", "a whole number"),
        ("depth=5,topk=1000", "topk=1000: must be from 1 to 63"),
        ("depth=5,topk=4,nodes=64", "nodes=64: must be from 1 to 63"),
        ("depth=5,nodes=24", "topk=1 is a chain"),
        ("tree=eagle,topk=4", "a fixed tree has its own"),
        ("tree=eagle,k=3", "k=3 has no effect beside tree=eagle"),
        ("tree=media", "nor one of medusa, eagle"),
        ("weights=int3", "int3"),
        ("draft_vocab=./nowhere.json", "nowhere.json is missing"),
        ("width=3", "no option 'width'"),
        ("trust=0", "trust=0.0"),
    ],
)
def test_a_wrong_option_of_a_head_gets_one_line(options, says, run):
    status, out, err = run("generate", "x", f"--speculation={heads.scheme('eagle3')},{options}")
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert says in err


def test_prompts_from_arguments_files_and_standard_input(run, tmp_path, monkeypatch):
    (tmp_path / "prompt").write_text("from a file")
    say(monkeypatch, "from stdin")
    status, out, _ = run(
        "generate", "one", "-", "--file", str(tmp_path / "prompt"), "--json", *GREEDY
    )
    assert status == 0
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["one", "from stdin", "from a file"]
    assert all(len(answer["token_ids"]) == 24 for answer in answers)


def test_several_answers_are_told_apart(run):
    _, out, _ = run("generate", "one", "two", "--n=2", "--max-tokens=4", "--seed=1")
    heads = [line for line in out.splitlines() if line.startswith("==>")]
    assert heads == [
        f"==> prompt {prompt}, answer {answer} <==" for prompt in (1, 2) for answer in (1, 2)
    ]


def test_a_trace_of_an_answer(run, tmp_path):
    path = tmp_path / "trace.json"
    status, _, said = run("generate", "--raw", "abab", *GREEDY, LOOKUP, f"--trace={path}")
    steps = [event for event in json.loads(path.read_text()) if event["name"] == "step"]
    assert status == 0
    assert sum(step["args"]["emitted"] for step in steps) == 24
    assert said.splitlines()[-1] == f"wrote {path}"


def test_bench_writes_a_report_and_a_trace(run, tmp_path):
    prompts, page, trace = (tmp_path / name for name in ("p.jsonl", "r.html", "t.json"))
    prompts.write_text('{"prompt": "ab ab ab"}\n')
    status, _, problems = run(
        "bench", "--max-tokens=12", LOOKUP, f"--prompts={prompts}", f"--report={page}",
        f"--trace={trace}", "--break-even",
    )  # fmt: skip
    assert status == 0, problems
    assert "Break-even by batch" in page.read_text()
    tracks = {e["args"]["name"] for e in json.loads(trace.read_text()) if e["ph"] == "M"}
    host = "plain and prompt-lookup:k=4,adaptive=false"
    assert tracks == {"foretell", host, f"{host}: device"}


def test_bench_says_where_its_break_even_was_interrupted(run, tmp_path, monkeypatch):
    prompts, facts, measure = tmp_path / "p.jsonl", tmp_path / "f.json", command.measure
    prompts.write_text('{"prompt": "ab ab ab"}\n')

    def cut(arms, conversations, config, *rest):
        found = measure(arms, conversations, config, *rest)
        return replace(found, complete=found.complete and config.batch < 4)

    monkeypatch.setattr(command, "measure", cut)
    asked = "bench", "--max-tokens=4", LOOKUP, f"--prompts={prompts}", f"--json={facts}"
    _, whole, _ = run(*asked)
    status, out, _ = run(*asked, "--break-even")
    assert status == 130
    assert "Interrupted" not in whole
    assert "Interrupted: not tried with 4 at once and more." in out
    assert list(json.loads(facts.read_text())["break_even"]) == ["1", "2"]


def test_an_interrupted_bench_keeps_what_it_has_and_is_no_success(run, tmp_path, monkeypatch):
    prompts, facts, measure = tmp_path / "p.jsonl", tmp_path / "f.json", command.measure
    prompts.write_text('{"prompt": "ab ab ab"}\n')
    cut = lambda *given: replace(measure(*given), complete=False)  # noqa: E731
    monkeypatch.setattr(command, "measure", cut)
    asked = "bench", "--max-tokens=4", LOOKUP, f"--prompts={prompts}", f"--json={facts}"
    status, out, problems = run(*asked)
    assert status == 130
    assert "Interrupted: these numbers are of the prompts done so far." in out
    assert f"wrote {facts}" in problems
    assert json.loads(facts.read_text())["complete"] is False


def test_raw_and_chat_differ_by_the_template(run):
    raw = json.loads(run("generate", "--raw", "abc", "--json", *GREEDY)[1])
    chat = json.loads(run("generate", "abc", "--system", "S", "--json", *GREEDY)[1])
    decode = lambda ids: "".join(["?", "", *tiny.LETTERS][i] for i in ids)  # noqa: E731
    assert decode(raw["prompt_token_ids"]) == "abc"
    assert decode(chat["prompt_token_ids"]) == "s S\nu abc\na "


def test_marks_cover_exactly_what_the_draft_supplied(run):
    one = json.loads(run("generate", "abcabcabc", *GREEDY, LOOKUP, "--json")[1])
    _, out, err = run("generate", "abcabcabc", *GREEDY, LOOKUP, "--show-draft")
    assert any(one["from_draft"]), "the draft was never right: this test shows nothing"
    assert not all(one["from_draft"])
    drafted, inside = [], False
    for character in out.rstrip("\n"):
        if character in "[]":
            inside = character == "["
        else:
            drafted.append(inside)
    assert out.replace("[", "").replace("]", "") == one["text"] + "\n"
    assert drafted == one["from_draft"]
    assert "guessed by the draft" in err


def test_origins_of_characters_made_of_several_tokens():
    class Bytes:
        """One byte a token."""

        def decode(self, ids, *, skip_special=True):
            return bytes(ids).decode(errors="replace")

    origins = Origins(Bytes(), [65])
    euro = list("€".encode())
    assert list(origins.split("", euro[:2], [False, False])) == []
    assert list(origins.split("€x", [euro[2], 120], [True, False])) == [("€", True), ("x", False)]
    assert list(origins.split("\ufffd", [], [])) == [("\ufffd", False)]


def test_control_characters_of_a_model_do_not_reach_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Screen(out=Terminal())
    screen.write("a\x1b[2Jb\r\tc\n")
    assert screen.out.getvalue() == "a\ufffd[2Jb\ufffd\tc\n"


def test_colour_follows_the_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen(show_draft=True, out=Terminal())
    screen.write("x", True)
    assert screen.out.getvalue() == "\x1b[1;32mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen(show_draft=True, out=Terminal())
    screen.write("x", True)
    assert screen.out.getvalue() == "[x]"


def test_stats_line():
    stats = Stats(num_tokens=30, num_passes=10, drafted=40, accepted=20)
    line = stats_line(stats)
    assert "30 tokens" in line
    assert "τ 3.00" in line
    assert "accepted 20 of 40 drafted (50%)" in line


# ---- chat


def test_sampling_that_is_not_given_is_the_models_own(run, model, monkeypatch):
    def answer(*flags):
        command = "--raw", "ab", "--seed=1", "--max-tokens=24", "--ignore-eos", *flags
        status, out, _ = run("generate", *command)
        assert status == 0
        return out

    free, greedy = answer(), answer("--temperature=0")
    assert free != greedy
    file = Path(model) / "generation_config.json"
    file.write_text('{"temperature": 0}')
    try:
        assert answer() == greedy
        assert answer("--temperature=1") == answer("--temperature=1.0") == free, "given, if equal"
        say(monkeypatch, "ab\n/exit\n")
        silent = run("chat", "--max-tokens=24")[1]
        say(monkeypatch, "ab\n/exit\n")
        assert silent == run("chat", "--max-tokens=24", "--temperature=0")[1]
    finally:
        file.unlink()


def test_chat_remembers_resets_and_leaves(run, monkeypatch):
    say(monkeypatch, "abc\nabc\n/reset\nabc\n/what\n\n/exit\nnever\n")
    status, out, err = run("chat", *GREEDY, LOOKUP, "--show-draft")
    assert status == 0
    text = out.replace("[", "").replace("]", "")
    answers = [text[i : i + 24] for i in range(0, 75, 25)]
    assert len(text) == 75, "three answers, nothing else"
    assert answers[0] == answers[2] != answers[1], "the second turn saw the first"
    assert err.count("tok/s") == 3
    assert "no command /what" in err


def test_chat_goes_on_after_a_turn_that_does_not_fit(run, monkeypatch):
    say(monkeypatch, "a" * 300 + "\nabc\n")
    status, out, err = run("chat", *GREEDY)
    assert status == 0
    assert len(out) == 25
    assert err.splitlines()[0].startswith("foretell: ")


def test_ctrl_c_ends_the_answer_and_keeps_the_session(model, monkeypatch, capsys):
    llm = tiny.llm()
    monkeypatch.setattr(llm, "tokenizer", None)
    prompt, original = [2, 3, 4], llm.engine.step
    steps = []

    def step():
        steps.append(1)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return original()

    monkeypatch.setattr(llm.engine, "step", step)
    result = terminal.stream(llm, prompt, tiny.greedy(max_tokens=100), Screen(), "r")
    assert result.finish_reason == "abort"
    assert 0 < len(result.token_ids) < 10
    tiny.check_idle(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "No such command 'nope'"),
        (["generate", "--nope", "x"], "No such option"),
        (["generate", "--top-k=x", "x"], "--top-k"),
        (["generate", "--temperature=-1", "x"], "temperature"),
        (["generate", "--weights=int3", "x"], "int8"),
        (["generate", "--speculation=prompt-lookup:k=8,x", "x"], "name=value"),
        (["generate", "--speculation=prompt-lookup:k=99", "x"], "from 1 to 63"),
        (["generate", "--kv-memory=lots", "x"], "512MiB"),
        (["generate", "--speculation=prompt-lookup:nope=2", "x"], "no option 'nope'"),
        (["generate", "--speculation=draft-model:model=./no", "x"], "./no: no such file"),
        (["bench", "--speculation=draft-model:weights=int9"], "int9"),
        (
            ["generate", "--show-draft", "--speculation=none", "x"],
            "--speculation prompt-lookup:k=8",
        ),
        (["generate", "--raw", "--system=s", "x"], "--raw"),
        (["generate", "--file=/nowhere/prompt"], "/nowhere/prompt: No such file"),
        (["generate", ""], "prompt is empty"),
        (["generate", "--model=smolm2", "x"], "did you mean smollm2"),
        (["generate", "--model=./nowhere", "x"], "no such file or directory"),
        (["generate", "--logit-bias=5", "x"], "ID=NUMBER"),
        (["pull", "smolm2"], "did you mean smollm2"),
        (["pull"], "MODEL"),
        (["bench", "--batch=0"], "batch"),
        (["bench", "--limit=0"], "--limit"),
        (["demo", "--speculation=none"], "--speculation"),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(arguments, says, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    assert err.startswith("foretell: ")
    assert says.lower() in err.lower()


def test_mistakes_are_told_before_weights_are_read(run, monkeypatch):
    monkeypatch.setattr(Checkpoint, "take", lambda *_: pytest.fail("weights are being read"))
    for wrong, says in [
        ("--max-model-len=513", "made for 512 tokens"),
        ("--speculation=nope", "prompt-lookup"),
        ("--speculation=prompt-lookup:ngram_min=x", "ngram_min"),
        ("--speculation=draft-model:model=./nowhere", "no such file"),
    ]:
        status, out, err = run("generate", "x", wrong)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert says in err


def test_mistakes_that_only_the_model_can_find(run):
    for arguments, says in [
        (["--speculation=nope:k=2", "x"], "prompt-lookup"),
        (["--speculation=prompt-lookup:nope=2", "x"], "option"),
        (["x" * 300], "256"),
        (["--logit-bias=99=1", "x"], "99"),
    ]:
        status, out, err = run("generate", *arguments)
        assert (status, out) == (2, ""), err
        assert len(err.splitlines()) == 1, err
        assert err.startswith("foretell: ")
        assert says in err


def program(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "foretell", *arguments], capture_output=True, text=True, **options
    )


def test_the_command_itself_prints_one_line():
    done = program("generate", "--model=smolm2", "x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("foretell: model 'smolm2' is unknown")


def test_help_and_pull_never_wait_for_torch():
    code = (
        "import sys; from foretell.cli import main; main([]); main(['generate', '--help']);"
        "main(['pull', 'smolm2']); heavy = {'torch', 'transformers', 'numba'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_outside_an_answer_is_no_traceback(sent):
    child = subprocess.Popen(
        [sys.executable, "-m", "foretell", "generate", "-"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child.stdin.write("word " * 40_000)  # more than a pipe holds: it is reading its prompt
    child.stdin.flush()
    child.send_signal(sent)
    child.stdin.close()
    assert child.wait() == 130
    assert child.stderr.read() == "foretell: interrupted\n"
