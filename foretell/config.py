"""Every default in one place. Command-line flags are made from these fields and their docs."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

Weights = Literal["int8", "bf16", "f32", "int4"]
Verification = Literal["coupled", "rejection", "block", "typical", "threshold"]

_ALIASES = {"bfloat16": "bf16", "float32": "f32", "fp32": "f32", "float": "f32"}
MAX_THREADS = 1024
"""OpenMP ends the process, without a word, where it cannot start as many as it was told."""
MAX_NUM_SEQS = 4096
"""Memory is taken for each of them beforehand."""


def whole(name: str, value: Any) -> int:
    """An int of whatever is one: Python's, NumPy's, a tensor's.

    Raises:
        ValueError: it is something else, True and False included.
    """
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    raise ValueError(f"{name}={value!r}: must be a whole number")


def check_range(config: object, least: float, most: float | None, *names: str) -> None:
    """
    Raises:
        ValueError: one of those fields, where it is given, is a number out of range.
    """
    for name in names:
        value = getattr(config, name)
        if value is None or (least <= value < float("inf") and (most is None or value <= most)):
            continue
        legal = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value}: must be {legal}")


def check_choice(config: object, name: str, kind: Any) -> None:
    """
    Raises:
        ValueError: the field is none of a Literal's values.
    """
    if (value := getattr(config, name)) not in get_args(kind):
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(get_args(kind))}")


def weight_format(text: str) -> Weights:
    """``int8``, ``bf16``, ``f32`` or ``int4``, long spellings allowed.

    Raises:
        ValueError: not a weight format.
    """
    name = _ALIASES.get(text, text)
    if name not in get_args(Weights):
        raise ValueError(f"weights={text!r}: choose one of {', '.join(get_args(Weights))}")
    return name  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Which scheme drafts, how far, and how its guesses are checked.

    Raises:
        ValueError: a value is out of range; the message says what is legal.
    """

    method: str
    """A file of foretell.drafters, module:Class, or auto."""
    k: int = 5
    """Draft tokens for each sequence and step."""
    verification: Verification = "coupled"
    """coupled: same seed, same text. rejection, block: same distribution, more accepted at high
    temperature. typical, threshold: faster but lossy."""
    threshold: float = 0.3
    """For the lossy rules: smallest target probability that is accepted (for typical, epsilon)."""
    adaptive: bool = True
    """Draft as much as pays at the moment, at most k, or not at all. False: always k."""
    options: dict[str, str] = field(default_factory=dict[str, str])
    """The scheme's own options, as written."""
    also: tuple[SpeculationConfig, ...] = ()
    """Further schemes: each sequence gets drafts from the one that pays most. How guesses are
    checked is the first one's."""

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not self.method:
            raise ValueError(f"speculation method={self.method!r}: must be a scheme's name")
        object.__setattr__(self, "k", whole("speculation k", self.k))
        if not isinstance(self.threshold, int | float):
            raise ValueError(f"threshold={self.threshold!r}: must be a number")
        if not 1 <= self.k <= 63:
            raise ValueError(f"speculation k={self.k}: must be from 1 to 63")
        if self.verification not in get_args(Verification):
            raise ValueError(
                f"verification={self.verification!r}: choose one of "
                + ", ".join(get_args(Verification))
            )
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive={self.adaptive!r}: must be True or False")
        if not all(isinstance(each, SpeculationConfig) for each in self.also):
            raise ValueError("also: must be SpeculationConfigs, or join schemes by + in one text")
        if self.method == "auto" and (self.also or self.options):
            raise ValueError(
                "auto chooses schemes and options itself: leave the rest out, or name "
                "a scheme in its place"
            )
        if self.also and not self.adaptive:
            raise ValueError("adaptive=false: goes with one scheme only, leave the others out")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold}: must be above 0 and at most 1")

    @classmethod
    def parse(cls, text: str) -> SpeculationConfig | None:
        """Reads ``method:name=value,name=value``; ``none`` and ``off`` give None. Several schemes
        are joined by ``+``; ``auto`` is what is worth trying with any model.

        Raises:
            ValueError: not of that form.
        """
        if text.strip().lower() in ("", "none", "off"):
            return None
        # A plus sign may be part of a path: the next scheme begins with a name and its options.
        first, *others = _joined(re.split(r"\+(?=[\w.\-]+(?::[^/]|\+|$))", text))
        schemes = [cls._parse(part) for part in (first, *others)]
        if not others:
            return schemes[0]
        for part in others:
            for name in ("verification", "threshold", "adaptive"):
                if re.search(rf"[:,]{name}=", part):
                    raise ValueError(f"speculation {text!r}: {name} is said with the first scheme")
        return replace(schemes[0], also=tuple(schemes[1:]))

    @classmethod
    def _parse(cls, text: str) -> SpeculationConfig:
        method, _, rest = text.strip().partition(":")
        if re.match(r"[A-Z_]\w*(,|$)", rest):  # module:Class and its options
            name, _, rest = rest.partition(",")
            method = f"{method}:{name}"
        given: dict[str, str] = {}
        for part in filter(None, (p.strip() for p in rest.split(","))):
            name, equals, value = part.partition("=")
            if not equals or not value:
                raise ValueError(
                    f"speculation {text!r}: {part!r} is not name=value; "
                    "write for example prompt-lookup:k=8"
                )
            name = name.strip().replace("-", "_")
            if name in given:
                raise ValueError(f"speculation {text!r}: {name} is given twice")
            given[name] = value.strip()
        if method == "auto" and "k" in given:
            raise ValueError(f"speculation {text!r}: auto chooses k itself, leave it out")
        adaptive = given.pop("adaptive", "true").lower()
        if adaptive not in ("true", "false"):
            raise ValueError(f"speculation {text!r}: adaptive must be true or false")
        try:
            return cls(
                method=method,
                adaptive=adaptive == "true",
                k=int(given.pop("k", cls.k)),
                verification=given.pop("verification", cls.verification),  # type: ignore[arg-type]
                threshold=float(given.pop("threshold", cls.threshold)),
                options=given,
            )
        except ValueError as error:
            if "invalid literal" in str(error) or "could not convert" in str(error):
                raise ValueError(
                    f"speculation {text!r}: k takes a whole number, threshold a number"
                ) from None
            raise


def _joined(parts: list[str]) -> list[str]:
    """Schemes that were divided at plus signs, whole again where one belongs to a path that is
    there."""
    for count in range(len(parts), 1, -1):
        whole = "+".join(parts[:count])
        if "=" in whole and Path(whole.rpartition("=")[2]).expanduser().exists():
            return [whole, *_joined(parts[count:])]
    return [parts[0], *_joined(parts[1:])] if parts else []


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine runs and how much of the machine it may use."""

    model: str = "smollm2"
    """A short name (smollm2), a hub name (org/model), a directory or a .gguf file."""
    weights: Weights = "int8"
    """int8 (default), bf16, f32 or int4."""
    speculation: SpeculationConfig | None = None
    """auto, a scheme with its options (prompt-lookup:k=8), several with + between them, or none."""
    max_num_seqs: int = 16
    """Sequences that run at once."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens; the model's own limit if not given."""
    max_num_batched_tokens: int = 512
    """Rows of one target pass: prompt chunks, roots and draft nodes together."""
    page_size: int = 16
    """Tokens in a KV page."""
    kv_memory: str = "0.3"
    """Memory for KV pages: a fraction of what is free (0.3) or a size (512MiB, 2GB)."""
    prefix_caching: bool = True
    """Keep KV pages of ended requests and share them with requests that start alike."""
    threads: int | None = None
    """CPU threads; all cores if not given."""
    device: str = "cpu"
    """Where the model runs: cpu, or cuda, a GPU for each rank."""
    tensor_parallel: int = 1
    """Processes (ranks) that the target is spread over; its heads must divide by it."""
    rank_timeout: float = 30.0
    """Seconds without a sign of life after which a rank counts as lost."""
    halves: bool = False
    """Over ranks: decode in two halves, one computing while the other's exchange is under way."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", weight_format(self.weights))
        for name in ("max_model_len", "threads"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(name, value))
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "tensor_parallel"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        check_range(self, 1, None, "max_num_batched_tokens", "page_size", "tensor_parallel")
        check_range(self, 1, MAX_NUM_SEQS, "max_num_seqs")
        check_range(self, 1, MAX_THREADS, "threads")
        check_range(self, 2, None, "max_model_len")
        if not 1 <= self.rank_timeout < float("inf"):
            raise ValueError(f"rank_timeout={self.rank_timeout}: must be 1 second or more")
        if self.halves and self.tensor_parallel == 1:
            raise ValueError("halves: exchanges are between ranks: set tensor_parallel too")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r}: must be cpu or cuda")
        for name in ("prefix_caching", "halves"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: every running sequence needs a row"
            )
        if not isinstance(self.speculation, SpeculationConfig | None):
            raise ValueError(
                f"speculation={self.speculation!r}: a SpeculationConfig, its short form such as "
                "prompt-lookup:k=8, or None"
            )
        k = self.speculation.k if self.speculation else 0
        if k and self.max_num_batched_tokens < k + 1:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than k + 1 = "
                f"{k + 1}: lower k or raise it"
            )
        parse_memory(self.kv_memory)

    def options(self, *without: str) -> dict[str, Any]:
        """Fields by name, as `foretell.LLM` takes them."""
        return {name: value for name, value in vars(self).items() if name not in without}

    def with_(self, **changes: object) -> EngineConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens and how much it takes on."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is open to the network."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    served_model_name: str | None = None
    """What clients call the model; the model's own name if not given."""
    api_key: str | None = None
    """Key that clients must send; FORETELL_API_KEY does the same and stays out of process lists."""
    cors_origins: SequenceOf[str] = ()
    """Web origins whose pages may call the server; none unless given."""
    max_body: str = "4MiB"
    """Largest request body."""
    max_queue: int = 64
    """Answers that may wait for a place among those that run (max_num_seqs); more get a 429."""
    request_timeout: float = 600.0
    """Seconds that a request may take, the wait for its turn included."""
    drain_timeout: float = 30.0
    """Seconds that answers in progress get when the server is told to stop."""
    replicas: int = 1
    """Engines that share the work, each in processes of its own; more than one needs Ray."""
    max_replicas: int | None = None
    """Start more under load, up to this many, and end them again."""

    def __post_init__(self) -> None:
        for name in ("port", "max_queue", "replicas"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port}: must be from 0 (any free one) to 65535")
        if self.max_queue < 0:
            raise ValueError(f"max_queue={self.max_queue}: must be 0 or more")
        if self.replicas < 1:
            raise ValueError(f"replicas={self.replicas}: must be at least 1")
        if self.max_replicas is not None:
            object.__setattr__(self, "max_replicas", whole("max_replicas", self.max_replicas))
            if self.max_replicas < self.replicas:
                raise ValueError(
                    f"max_replicas={self.max_replicas}: must be at least replicas={self.replicas}"
                )
        for name in ("request_timeout", "drain_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: must be seconds above 0")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("api_key is empty: leave it out, or give a key")
        if isinstance(parse_memory(self.max_body), float):
            raise ValueError(f"max_body={self.max_body!r}: must be a size such as 4MiB")


def parse_memory(text: str, name: str = "kv_memory") -> float | int:
    """A fraction as float in (0, 1], or a size as int bytes.

    Raises:
        ValueError: neither.
    """
    match = re.fullmatch(r"([\d.]+)\s*([kmgt]?i?b?)", str(text).strip().lower())
    try:
        number = float(match[1]) if match else -1.0
    except ValueError:
        number = -1.0
    unit = match[2] if match else ""
    if not unit and 0 < number <= 1:
        return number
    if number > 0 and unit:
        base = 1024 if "i" in unit else 1000
        return int(number * base ** (" kmgt".index(unit[0]) if unit[0] in "kmgt" else 0))
    raise ValueError(f"{name}={text!r}: a fraction such as 0.3 or a size such as 512MiB")


def home() -> Path:
    """Where models and compiled kernels are kept: FORETELL_HOME, else XDG_CACHE_HOME/foretell,
    else ~/.cache/foretell."""
    if given := os.environ.get("FORETELL_HOME"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "foretell"
