"""The page at / and its parts, as they lie in the package."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Response

from foretell.server.errors import ApiError

PAGE = Path(__file__).with_name("page")
PAGE_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_page(app: FastAPI) -> None:
    """Adds the page's routes, which nobody needs a key for."""
    parts = {path.name: path for path in PAGE.iterdir()}

    @app.get("/", include_in_schema=False)
    @app.get("/page/{name}", include_in_schema=False)
    async def page(name: str = "index.html") -> Response:
        if name not in parts:
            raise ApiError(404, f"the page has no part {name!r}", code="not_found")
        headers = {
            "Content-Security-Policy": PAGE_POLICY,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        }
        kind = PAGE_TYPES[parts[name].suffix]
        return Response(parts[name].read_bytes(), headers=headers, media_type=kind)
