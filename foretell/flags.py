"""Command-line flags out of configuration dataclasses: a field is declared and described once.

The help text of a flag is the string literal under its field. Python drops those literals, so
they are read from the class's source.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from foretell.config import SpeculationConfig

# How each kind of value is read from text, and what stands for it in the help.
_SCALARS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "INTEGER"),
    float: (float, "NUMBER"),
    str: (str, "TEXT"),
    SpeculationConfig: (SpeculationConfig.parse, "SCHEME[:NAME=VALUE,...]"),
}


@cache
def field_docs(config: type) -> dict[str, str]:
    """The doc line under each field of a dataclass."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[field.target.id] = inspect.cleandoc(str(after.value.value)).replace("\n", " ")
    return docs


def option(metavar: str, text: str, *names: str, **more: Any) -> Any:
    """A flag of a command's own, for `Annotated`; ``more`` is typer's."""
    return typer.Option(*names, metavar=metavar or None, help=text, **more)


def from_fields(
    *configs: type, without: Sequence[str] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one flag for each field of each dataclass.

    The command names a parameter after each class's place: it is called with the built objects in
    the order of ``configs`` first, then with its own parameters.

    Args:
        without: fields that make no sense for this command.
        defaults: a default that differs from the field's.

    Raises:
        ValueError: from the dataclass, when a value is out of range.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(configs) :]
        flags = {
            config: [
                _flag(config, field, defaults)
                for field in dataclasses.fields(config)
                if field.name not in without
            ]
            for config in configs
        }

        @wraps(command)
        def run(**given: Any) -> None:
            built: list[Any] = []
            for config, options in flags.items():
                names = [option.name for option in options]
                built.append(config(**{name: _value(given.pop(name)) for name in names}))
            command(*built, **given)

        parameters = [*own, *(option for options in flags.values() for option in options)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__  # typer would look at the undecorated signature
        return run

    return wrap


def _flag(
    config: type, field: dataclasses.Field[Any], defaults: dict[str, Any]
) -> inspect.Parameter:
    kind = get_type_hints(config)[field.name]
    default = defaults.get(field.name, field.default)
    option: dict[str, Any] = {"help": field_docs(config).get(field.name, "")}
    name = "--" + field.name.replace("_", "-")
    inner = _without_none(kind)
    if inner is bool:
        annotation: Any = bool
        names = [f"{name}/--no-{name[2:]}" if default else name]
    else:
        names = [name]
        reader, metavar, many = _reader(inner, optional=inner is not kind)
        annotation = list[str] if many else str
        option |= {"parser": _checked(reader, metavar), "metavar": metavar}
        option["show_default"] = default not in (None, ())
        default = None if default == () else default
        if default is not None and not many:
            default = _Shown(default)
        if default is None:
            annotation = annotation | None
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[annotation, typer.Option(*names, **option)],
    )


class _Shown(str):
    """A default as text for the help; the parser gets it and reads it like anything typed."""

    def __new__(cls, value: Any) -> _Shown:
        return super().__new__(cls, value)


def _reader(kind: Any, *, optional: bool) -> tuple[Callable[[str], Any], str, bool]:
    origin = get_origin(kind)
    if origin is Literal:
        return str, "|".join(get_args(kind)), False
    if origin is dict:
        return _pair, "ID=NUMBER", True
    if origin is not None:  # a sequence
        reader, metavar = _SCALARS[get_args(kind)[0]]
        return reader, metavar, True
    reader, metavar = _SCALARS[kind]
    if optional and kind is not SpeculationConfig:
        return lambda text: None if text.lower() == "none" else reader(text), metavar, False
    return reader, metavar, False


def _checked(reader: Callable[[str], Any], metavar: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return _Read(reader(text))
        except ValueError as error:
            own = str(error)
            if own.startswith(("invalid literal", "could not convert")):
                own = f"{text!r} is not {metavar}"
            raise typer.BadParameter(own) from None

    return read


@dataclasses.dataclass(frozen=True)
class _Read:
    """A value that was read, boxed: click drops a bare None."""

    value: Any


def _value(given: Any) -> Any:
    if isinstance(given, _Read):
        return given.value
    if isinstance(given, list):
        values = [_value(each) for each in given]  # type: ignore[misc]
        pairs = values and isinstance(values[0], _Pair)
        return {pair.id: pair.number for pair in values} if pairs else values
    return given


@dataclasses.dataclass(frozen=True)
class _Pair:
    id: int
    number: float


def _pair(text: str) -> _Pair:
    token, _, number = text.partition("=")
    return _Pair(int(token), float(number))


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        (inner,) = (part for part in get_args(kind) if part is not types.NoneType)
        return inner
    return kind
