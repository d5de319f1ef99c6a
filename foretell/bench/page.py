"""Pages of HTML that need nothing else: the templates in ``pages``, for screens, phones, dark
rooms and paper."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("foretell.bench", "pages"),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def render(template: str, **values: Any) -> str:
    """The page of a template. What is text is escaped, what is `markupsafe.Markup` is not.

    Raises:
        jinja2.UndefinedError: a value that the template names is missing.
    """
    return _templates().get_template(template).render(**values) + "\n"
