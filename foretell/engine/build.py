"""Puts an engine together from a configuration."""

from __future__ import annotations

from collections.abc import Callable

from foretell.attention.pool import num_threads, set_num_threads
from foretell.config import EngineConfig
from foretell.drafters import build as build_drafter
from foretell.drafters import check as check_drafter
from foretell.drafters import expand
from foretell.engine.calibrate import calibrate
from foretell.engine.engine import Engine
from foretell.models.config import ModelConfig
from foretell.models.hub import resolve
from foretell.models.loader import LoadedModel, load, open_source
from foretell.models.sharding import Shard
from foretell.runtime.gpu import device_of
from foretell.runtime.parallel import Leader, ParallelRuntime
from foretell.runtime.rank import follow
from foretell.runtime.runner import Runtime
from foretell.runtime.torchrun import torchrun
from foretell.spec.drafter import merge_needs


def build_engine(
    config: EngineConfig, target: LoadedModel | None = None
) -> tuple[Engine, LoadedModel]:
    """Loads the target and the drafter and takes KV memory.

    Args:
        target: a model that is loaded already; ``config.model`` is then only a name.

    Raises:
        ValueError: something does not exist, does not fit or does not go together.
        RankError: another rank does not come or does not fit.
        SystemExit: this is another rank than the first of torchrun's, and the first has ended.
    """
    set_num_threads(config.threads or num_threads())
    if config.speculation:
        check_drafter(config.speculation)  # a mistake need not wait for the model

    def accept(model: ModelConfig) -> None:
        limit = model.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > limit:
            raise ValueError(
                f"max_model_len={config.max_model_len}: the model was made for {limit} tokens"
            )

    leader = None
    if config.tensor_parallel > 1:
        leader = _lead(config, target, accept)
    if target is None:
        target = load(
            config.model, config.weights, max_model_len=config.max_model_len, accept=accept,
            ranks=leader and leader.group, device=leader.device if leader else device_of(config),
        )  # fmt: skip
    else:
        accept(target.config)
        if config.device != "cpu" and target.device.type == "cpu":
            raise ValueError(f"device={config.device}: the model given lies on the CPU")
    if leader is None:
        runtime = Runtime.of(config, target)
    else:
        runtime = ParallelRuntime.of(config, target, leader=leader)
    if config.speculation:
        config = config.with_(speculation=expand(config.speculation, target))
    schemes = (config.speculation, *config.speculation.also) if config.speculation else ()
    drafters = [build_drafter(scheme, runtime) for scheme in schemes]
    draft_group = None
    if drafters:
        needs = merge_needs(drafters)
        runtime.taps, draft_group = needs.features, needs.kv
    groups = [runtime.target_group, *([draft_group] if draft_group else [])]
    if leader is not None:  # they take their KV from the same memory
        groups += [runtime.target_group] * (leader.group.sharers - 1)
    runtime.begin(runtime.room(config, groups), draft_group)
    for drafter in drafters:
        drafter.warm()
    engine = Engine(config, runtime, drafters, frozenset(target.config.eos_token_ids))
    calibrate(engine, target)
    return engine, target


def _lead(
    config: EngineConfig, target: LoadedModel | None, accept: Callable[[ModelConfig], None]
) -> Leader:
    """Starts the other ranks. Where torchrun has started this one as another than the first, it
    serves here until the first ends."""
    if target is not None:
        raise ValueError("tensor_parallel: give the model's name, each rank loads its own part")
    model = open_source(resolve(config.model))[1]
    accept(model)
    Shard(
        model, 0, config.tensor_parallel
    )  # what does not divide is refused before anything starts
    place = torchrun()
    neighbours = place.neighbours if place else config.tensor_parallel
    set_num_threads(max(1, num_threads() // neighbours))
    if place and place.rank:
        follow(config, place.group(config), None)
        raise SystemExit(0)
    return Leader(config, model)
