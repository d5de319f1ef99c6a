"""A rank that is not the first: receive a buffer, run its rows, and again.

It has a part of the target, and of a head that drafts single tokens; of other drafts nothing.
"""

from __future__ import annotations

import json
import pickle
import signal
import socket
import sys
from contextlib import suppress

import torch
from torch import Tensor

from foretell.attention.pool import num_threads, set_num_threads
from foretell.config import EngineConfig
from foretell.drafters import spread_head
from foretell.models.head import Head
from foretell.models.loader import load
from foretell.runtime.batch import FOLLOW, HEAD, HEADER, TARGET
from foretell.runtime.channel import Broadcast, Channel, SharedMemory
from foretell.runtime.gpu import device_of
from foretell.runtime.identity import identity
from foretell.runtime.memory import storages, tensors_alive
from foretell.runtime.ranks import Group, RankError
from foretell.runtime.runner import Runtime


def follow(config: EngineConfig, group: Group, channel: Channel | None) -> None:
    """Serves until rank 0 ends.

    Args:
        channel: where buffers come from; torch's broadcast if not given.

    Raises:
        RankError: this rank does not fit to rank 0.
        OSError: rank 0 is lost.
    """
    group.halves = config.halves
    group.ask("identity", identity(config))
    channel = channel or Broadcast(group.words())
    target = load(
        config.model, config.weights, max_model_len=config.max_model_len, progress=False,
        ranks=group, device=group.device,
    )  # fmt: skip
    runtime = Runtime.of(config, target)
    loaded = spread_head(config.speculation, target)
    draft = None
    if loaded is not None:
        runtime.taps, draft = loaded.taps, loaded.head.config.kv_group(loaded.kv_dtype)
    groups = [runtime.target_group, *([draft] if draft else [])]
    room = runtime.room(config, groups * group.sharers)
    runtime.allocate(group.ask("loaded", room), draft)
    runtime.warm()
    group.ask("memory", memory(runtime, loaded))
    group.connect()
    serve(runtime, channel, loaded and loaded.head)
    group.close()


@torch.inference_mode()
def serve(runtime: Runtime, channel: Channel, head: Head | None) -> None:
    """The loop.

    Args:
        head: this rank's part of one.
    """
    assert runtime.kv is not None
    features: Tensor | None = None
    while (words := channel.receive()) is not None:
        what = words[HEADER - 1]
        ready = runtime.plan(words) if what != FOLLOW else runtime.ran
        assert ready is not None
        rows, sequences = len(ready.batch.tokens), len(ready.batch.layout.page_table)
        if what == TARGET:
            if ready.batch.moves.numel():
                runtime.kv.move("target", *ready.batch.moves.tolist())
            features = runtime.run_target(ready).features
            continue
        assert head is not None
        assert head.ranks is not None
        if what == HEAD:
            given = torch.empty(rows, head.config.hidden_size, device=runtime.device)
            head.ranks.share(given)
            runtime.run_head(head, ready, given)
        else:
            assert features is not None
            both = torch.empty(rows + sequences, dtype=torch.int64, device=runtime.device)
            head.ranks.share(both)
            runtime.follow_target(head, both[:rows], head.feature(features), both[rows:])


def memory(runtime: Runtime, drafter: object = None) -> dict[str, int]:
    """Bytes by group, and of all tensors in this process."""
    assert runtime.kv is not None
    target = storages(runtime.target.model)
    draft = storages(drafter, without=[runtime]) if drafter else {}
    kv = {name: sum(storages(layers).values()) for name, layers in runtime.kv.layers.items()}
    return {
        "target weights": sum(target.values()),
        "draft weights": sum(size for at, size in draft.items() if at not in target),
        "target KV": kv["target"],
        "draft KV": kv.get("draft", 0),
        "all tensors": tensors_alive(),
    }


def main(text: str) -> int:
    """A rank that rank 0 has started."""
    what = json.loads(text)
    config: EngineConfig = pickle.loads(bytes.fromhex(what["config"]))  # of this very user
    set_num_threads(max(1, (config.threads or num_threads()) // config.tensor_parallel))
    channel = SharedMemory(what["memory"], [socket.socket(fileno=what["socket"])])
    world = config.tensor_parallel
    rank = what["rank"]
    group = Group(
        rank, world, "127.0.0.1", what["port"], config.rank_timeout, neighbours=world,
        device=device_of(config, rank),
    )  # fmt: skip
    try:
        follow(config, group, channel)
    except (RankError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        with suppress(Exception):
            group.tell("error", reason)
        group.close()
        print(f"foretell: rank {group.rank}: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main(sys.argv[1]))
