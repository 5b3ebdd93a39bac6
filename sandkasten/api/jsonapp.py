"""The Quart half: JSON routes, and pages later on. Routing and nothing else.

Request ids, keys and bodies are done before it; errors become answers in `errors.py`. What a key may is asked
here, where the route is known.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from sandkasten.api.http.auth import admit
from sandkasten.api.http.errors import Answer, error_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.routes import JSON_ROUTES, JsonRoute
from sandkasten.model import errors
from sandkasten.model.errors import SandkastenError

EXCHANGE_KEY = "sandkasten.exchange"


def make_json_app() -> QuartTrio:
    """Return the app; each request's scope must carry its `Exchange`, with the body read."""
    app = QuartTrio("sandkasten.api", static_folder=None)
    app.url_map.merge_slashes = False
    for route in JSON_ROUTES:
        app.add_url_rule(
            route.rule,
            endpoint=f"{route.method} {route.rule}",
            view_func=_view(route),
            methods=[route.method],
            provide_automatic_options=False,
        )
    app.register_error_handler(HTTPException, _on_http_exception)
    app.register_error_handler(Exception, _on_exception)
    return app


def _view(route: JsonRoute) -> Callable[..., Awaitable[Response]]:
    template = route.template

    async def view(**_path_arguments: str) -> Response:
        exchange = cast("dict[str, Exchange]", request.scope)[EXCHANGE_KEY]
        exchange.route = template
        await admit(exchange.key, route.needs, exchange.supervisor, session_id=exchange.session_id)
        answer = await route.handler(exchange)
        exchange.use.leave()  # Quart sends the end of an answer when the client may already have all of it
        return _response(answer)

    return view


async def _on_exception(error: Exception) -> Response:
    return _response(error_answer(error))


async def _on_http_exception(error: HTTPException) -> Response:
    """Routing's own refusals; nothing else in this half raises them."""
    if isinstance(error, MethodNotAllowed):
        allowed = ", ".join(sorted(error.valid_methods or ()))
        return _response(error_answer(errors.MethodNotAllowed("no such method here", allow=allowed)))
    public: SandkastenError = errors.RouteNotFound("no such URL")
    return _response(error_answer(public if error.code == 404 else errors.InvalidRequest("malformed request")))


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers), content_type="application/json")
