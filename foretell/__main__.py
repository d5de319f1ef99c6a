"""``python -m foretell``."""

from foretell.cli import entry

entry()
