"""One engine in a process of its own: requests as JSON lines on stdin, answers on stdout.

Between two requests the process is blocked reading stdin, so it takes no processor time from the
engine whose turn it is. Only the standard library: peers run under pythons of their own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def serve(engine: Any) -> None:
    """Calls ``engine.<do>(**rest)`` for each request ``{"do": ..., **rest}`` until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get into the answers
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(engine, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)
