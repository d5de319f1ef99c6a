"""Errors in the shape of OpenAI's API: what clients' libraries know how to read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

_HALF = re.compile(rb"\\ud[89a-f][0-9a-f]{2}|\xed[\xa0-\xbf]", re.IGNORECASE)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: says what to do about it.
        param: the field of the request that is to blame.
        code: for programs.
        retry_after: seconds until it makes sense to ask again.
        headers: more of them.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def of_value_error(error: ValueError) -> ApiError:
    """The engine's own messages begin with the field: ``top_p=2: must be ...``."""
    message = str(error)
    if "max_model_len" in message:
        return ApiError(400, message, param="messages", code="context_length_exceeded")
    name = message.partition("=")[0].partition(":")[0]
    return bad_request(message, name if name.isidentifier() else None)


def of_invalid_body(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "str")]
    param = ".".join(place) or None
    kind = first["type"]
    if kind == "extra_forbidden":
        message = f"{param}: this field is not known here; leave it out"
        return ApiError(400, message, param=param, code="unknown_parameter")
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    if not place:
        message = "the body must be a JSON object, sent as Content-Type: application/json"
        return ApiError(400, message, code="invalid_json")
    text = str(first["msg"]).removeprefix("Value error, ")
    message = text if text.startswith(place[0]) else f"{param}: {text}"
    code = {"missing": "missing_required_parameter"}.get(kind, "invalid_value")
    return ApiError(400, message, param=param, code=code)


async def check_text(request: Request) -> None:
    """Refuses bodies with half a surrogate pair in them: JSON can say it, and no text can."""
    if _HALF.search(await request.body()):
        try:
            json.dumps(await request.json(), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            message = "the body is no text: half of a surrogate pair is in it"
            raise ApiError(400, message, code="invalid_json") from None


def of_http(error: HTTPException, request: Request) -> ApiError:
    """What the router says: no such path, no such method."""
    if error.status_code == 404:
        return ApiError(404, f"there is nothing at {request.url.path}", code="not_found")
    if error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers)
    if error.status_code == 400:  # neither our own errors nor those of JSON's grammar
        message = (
            "the body cannot be read: no UTF-8 text, too deep, or a number of a thousand digits"
        )
        return ApiError(400, message, code="invalid_json")
    return ApiError(error.status_code, str(error.detail))
