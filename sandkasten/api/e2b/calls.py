"""Calls of E2B's services by the Connect protocol: unary ones, answers that are streams, and a client's stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from trio.lowlevel import checkpoint

from sandkasten.api.e2b.connect import (
    BREAKS,
    STATUS,
    Code,
    ConnectError,
    EnvelopeReader,
    code_of,
    decode_message,
    ending,
    envelope,
    error_object,
    message_of,
)
from sandkasten.api.e2b.context import EnvdRequest
from sandkasten.api.e2b.process import Writing, stream_input
from sandkasten.api.http.connection import ClientGone
from sandkasten.api.http.errors import Answer, json_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.json import check_value_count
from sandkasten.api.resources.file_contents import ANY_SIZE
from sandkasten.errors import InvalidRequest, SandkastenError

Unary = Callable[[EnvdRequest, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
ServerStream = Callable[[EnvdRequest, Mapping[str, Any], Writing], Awaitable[None]]

_JSON = "application/json"
_STREAM = "application/connect+json"


async def call(request: EnvdRequest, method: Unary) -> Answer:
    """Answer a unary call."""
    exchange = request.exchange
    if (refusal := _refuse_type(exchange, _JSON)) is not None:
        return refusal
    try:
        message = decode_message(await exchange.read_json_body(limit_bytes=exchange.settings.max_json_bytes))
        return json_answer(await exchange.until_disconnect(lambda: request.in_time(lambda: method(request, message))))
    except (ConnectError, SandkastenError) as error:
        if isinstance(error, BREAKS):
            raise
        return json_answer(_spelled(error), status=STATUS[code_of(error)])


async def stream(request: EnvdRequest, method: ServerStream) -> Answer | None:
    """Answer a call with a stream. An error is its last message: a client in JavaScript reads no other."""
    exchange = request.exchange
    if (refusal := _refuse_type(exchange, _STREAM)) is not None:
        return refusal

    async def write(data: bytes) -> None:
        if not exchange.is_started:
            await exchange.start(200, (("content-type", _STREAM),))
        await exchange.write(data)

    async def work() -> None:
        await method(request, message, write)

    last = ending()
    try:
        message = await _one_message(exchange)
        await exchange.until_disconnect(work)
    except Exception as group:  # the edge: every error becomes the last message
        error = _single(group)
        if isinstance(error, (*BREAKS, ClientGone)) or not isinstance(error, ConnectError | SandkastenError):
            raise error from group
        last = ending(_spelled(error))
    if not exchange.is_started:
        await exchange.start(200, (("content-type", _STREAM),))
    await exchange.finish(last)
    return None


async def _one_message(exchange: Exchange) -> Mapping[str, Any]:
    """Return the one message of a client's stream."""
    found: Mapping[str, Any] | None = None
    async with aclosing(_messages(exchange)) as messages:
        async for message in messages:
            if found is not None:
                raise InvalidRequest("the stream must have one message", messages=2)
            found = message
    if found is None:
        raise InvalidRequest("the stream must have one message", messages=0)
    return found


async def _messages(exchange: Exchange) -> AsyncGenerator[Mapping[str, Any]]:
    limit_bytes = exchange.settings.max_json_bytes
    reader = EnvelopeReader(limit_bytes)
    while chunk := await exchange.read_chunk(limit_bytes=ANY_SIZE):
        for body in reader.feed(chunk):
            await check_value_count(body)
            yield decode_message(body)
            await checkpoint()  # a piece of the body may hold many messages
    reader.finish()


async def take_stream(request: EnvdRequest) -> Answer | None:
    """Take a client's stream of input, and answer it at its end."""
    exchange = request.exchange
    if (refusal := _refuse_type(exchange, _STREAM)) is not None:
        return refusal
    try:
        async with aclosing(_messages(exchange)) as messages:
            done = await request.in_time(lambda: stream_input(request, messages))
        last = envelope(done) + ending()
    except (ConnectError, SandkastenError) as error:
        if isinstance(error, BREAKS):
            raise
        last = ending(_spelled(error))
    unread = () if exchange.is_body_done else (("connection", "close"),)
    await exchange.start(200, (("content-type", _STREAM), ("content-length", str(len(last))), *unread))
    await exchange.finish(last)
    return None


def _refuse_type(exchange: Exchange, wanted: str) -> Answer | None:
    """Return the refusal of a body in another codec than JSON, or compressed: 415, or the code for a coding."""
    if exchange.media_type != wanted:
        return Answer(415, b"{}", (("accept-post", wanted),))
    codings = {exchange.header(b"content-encoding"), exchange.header(b"connect-content-encoding")}
    if codings - {None, "identity"}:
        return json_answer(error_object(Code.UNIMPLEMENTED, "no coding but identity is taken"), status=501)
    return None


def _single(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _spelled(error: Exception) -> Mapping[str, str]:
    return error_object(code_of(error), error.message if isinstance(error, ConnectError) else message_of(error))
