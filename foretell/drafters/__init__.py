"""Schemes, one file each. A scheme is found by its file's name, or anywhere as module:Class."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from foretell.config import SpeculationConfig
from foretell.models.head_formats import LoadedHead
from foretell.models.hub import packaged_head
from foretell.models.loader import LoadedModel
from foretell.spec.drafter import Drafter, DraftRuntime
from foretell.spec.options import read_options
from foretell.spec.tree_shape import TreeOptions

AUTO = "auto"
"""In place of a scheme: whatever is worth trying with the target."""


def schemes() -> list[str]:
    """Names of the schemes that come with the package."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def find(method: str) -> type[Drafter]:
    """The drafter class behind a name such as ``prompt-lookup``, or ``module:Class``.

    Raises:
        ValueError: there is none; the message lists the names that exist.
    """
    module_name, colon, class_name = method.partition(":")
    known = colon or method.replace("_", "-") in schemes()
    if module_name.startswith(".") or not known:
        raise ValueError(
            f"speculation method {method!r} is unknown: choose one of auto, none, "
            f"{', '.join(schemes())}, or name your own as module:Class"
        )
    if not colon:
        module_name = f"{__name__}.{method.replace('-', '_')}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ValueError(
            f"speculation method {method!r}: no module {module_name!r} on the Python path"
        ) from None
    own = [value for value in vars(module).values() if _is_drafter(value, module_name)]
    if colon:
        own = [value for value in (getattr(module, class_name, None),) if _is_drafter(value)]
    if len(own) != 1:
        what = f"no Drafter subclass {class_name!r}" if colon else f"{len(own)} Drafter subclasses"
        raise ValueError(f"speculation method {method!r}: {what} in {module_name}, one is needed")
    return own[0]


def check(config: SpeculationConfig) -> None:
    """Looks at everything about a scheme that can be looked at without a target.

    Raises:
        ValueError: as `build`.
    """
    for each in () if config.method == AUTO else (config, *config.also):
        options = read_options(find(each.method).Options, each.options, each.method)
        if isinstance(options, TreeOptions):
            options.shape(each.k)


def expand(config: SpeculationConfig, target: LoadedModel) -> SpeculationConfig:
    """``auto`` spelled out: prompt lookup, which needs nothing, and a head that comes with this
    package, if one was made for the target. Anything else stays as it is."""
    if config.method != AUTO:
        return config
    heads = [name for name in schemes() if packaged_head(name, target.config.sizes)]
    if not config.adaptive:  # nobody chooses
        heads = []
    also = tuple(replace(config, method=name, k=SpeculationConfig.k) for name in heads[:1])
    return replace(config, method="prompt-lookup", k=8, also=also)


def _spread(config: SpeculationConfig | None) -> tuple[Any, SpeculationConfig, Any] | None:
    """Class, configuration and options of the head that is spread over ranks."""
    from foretell.drafters.eagle import Eagle

    for each in (config, *config.also) if config and config.method != AUTO else ():
        kind = find(each.method)
        options: Any = read_options(kind.Options, each.options, each.method)
        if issubclass(kind, Eagle) and options.is_spread(each.k):
            return kind, each, options
    return None


def spread_head(config: SpeculationConfig | None, target: LoadedModel) -> LoadedHead | None:
    """This rank's part of the head that is spread over ranks, None where there is none."""
    found = _spread(config) if target.model.ranks else None
    return found and found[0].load(found[1], found[2], target)


def spread_files(
    config: SpeculationConfig | None, target: Path, sizes: dict[str, int]
) -> list[Path]:
    """What every rank reads of such a head.

    Args:
        target: where that is.
        sizes: of the target, see `ModelConfig.sizes`.
    """
    found = _spread(config)
    return found[2].files(found[1].method, target, sizes) if found else []


def build(config: SpeculationConfig, runtime: DraftRuntime) -> Drafter:
    """The drafter that ``config`` names (its first one), with its options read.

    Raises:
        ValueError: unknown scheme or option, or a value that an option does not take.
    """
    return find(config.method)(config, runtime)


def _is_drafter(value: Any, module: str | None = None) -> TypeGuard[type[Drafter]]:
    return (
        isinstance(value, type)
        and issubclass(value, Drafter)
        and value is not Drafter
        and (module is None or value.__module__ == module)
    )
