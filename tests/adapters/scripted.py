"""A server of scripted models on the loopback: Anthropic's messages and OpenAI's responses, as the real clients ask.

A script is a list of turns. A turn is a text, or a tool use: the tool's name and its input. The server answers each
request with the next turn, and keeps the requests. So examples run as they are: only the address is another.

Anthropic's self-hosted environments are served, too: one piece of work, whose session goes through the turns up to a
text. Then there is no more work, which ends the worker.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Turn = str | tuple[str, dict[str, Any]]


class ScriptedModel:
    """The server, and what it was asked."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = list(turns)
        self.requests: list[dict[str, Any]] = []
        self.orders: list[str] = []
        """Orders of a worker of an environment about its piece of work."""
        self.is_claimed = False
        self.news: queue.Queue[dict[str, Any]] = queue.Queue()
        """Results of a session's tools."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which the real clients find this server."""
        return {"ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_URL": self.url, "OPENAI_BASE_URL": f"{self.url}/v1"}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def results(self) -> list[dict[str, Any]]:
        """The tool results that the model has got, each once: a client may send all of them again, or only new ones."""
        found: dict[str, dict[str, Any]] = {}
        for request in self.requests:
            messages = request.get("messages") or request.get("input") or request.get("events") or []
            for each in messages if isinstance(messages, list) else ():
                parts = each["content"] if isinstance(each.get("content"), list) else [each]
                found |= {part["tool_use_id"]: part for part in parts if part.get("type") == "tool_result"}
                if each.get("type") == "function_call_output":
                    found[each["call_id"]] = each
                if each.get("type") == "user.tool_result":
                    found[each["tool_use_id"]] = each
        return list(found.values())

    def texts(self) -> list[str]:
        """The same as texts."""
        return [_text(each.get("content", each.get("output"))) for each in self.results()]

    def session_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of a session: each tool use, after the result of the one before, and the end."""
        while not isinstance(turn := self.turns.pop(0), str):
            use = {"type": "agent.tool_use", "id": f"use{len(self.turns)}", "name": turn[0], "input": turn[1]}
            yield use | {"evaluated_permission": "allow"}
            self.news.get()
        yield {"type": "session.status_terminated", "id": "end"}

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, which is the next turn in the form that its path stands for."""
        if "/work/" in path:
            self.orders.append(path.rpartition("/")[2])
            beat = {"lease_extended": True, "state": "active", "ttl_seconds": 60, "last_heartbeat": "now"}
            return _WORK | beat | {"type": "work_heartbeat"}
        self.requests.append(request)
        if path.endswith("/events"):
            self.news.put(request)
            return {"data": []}
        number = len(self.requests)
        turn = self.turns.pop(0) if self.turns else "done"
        model = request.get("model", "")
        if path.endswith("/responses"):
            output: dict[str, Any] = {"type": "message", "id": f"m{number}", "role": "assistant", "status": "completed"}
            output |= {"content": [{"type": "output_text", "text": turn, "annotations": []}]}
            if not isinstance(turn, str):
                call = {"call_id": f"call{number}", "name": turn[0], "arguments": json.dumps(turn[1])}
                output = {"type": "function_call", "id": f"f{number}", "status": "completed", **call}
            tokens: dict[str, Any] = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
            tokens |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
            return {
                "id": f"r{number}",
                "object": "response",
                "created_at": 0,
                "status": "completed",
                "model": model,
                "output": [output],
                "parallel_tool_calls": False,
                "tool_choice": "auto",
                "tools": [],
                "usage": tokens,
            }
        block: dict[str, Any] = {"type": "text", "text": turn}
        if not isinstance(turn, str):
            block = {"type": "tool_use", "id": f"toolu_{number}", "name": turn[0], "input": turn[1]}
        return {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [block],
            "stop_reason": "end_turn" if isinstance(turn, str) else "tool_use",
            "stop_sequence": None,
            "usage": {"input_tokens": 1, "output_tokens": 1},
        }


_WORK = {"type": "work", "id": "work", "environment_id": "env", "data": {"type": "session", "id": "s"}}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())


def _events(message: dict[str, Any]) -> str:
    """Return a message of Anthropic's as the events of a stream, with its only block in one piece."""
    (block,) = message["content"]
    empty: dict[str, Any]
    if block["type"] == "text":
        empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
    else:
        empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message | {"content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": block | empty},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": message["stop_reason"]}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    return "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events)


def _handler(model: ScriptedModel) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing on the standard error of the tests."""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.endswith("/stream"):
                self._say("", "text/event-stream", is_last=True)
                for event in model.session_events():
                    self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
            elif path.endswith("/poll") and model.is_claimed:
                self.send_error(403)
            elif path.endswith("/poll"):
                model.is_claimed = True
                self._say(json.dumps(_WORK))
            else:
                session = {"id": "s", "type": "session", "status": "running", "resources": [], "agent": {"skills": []}}
                self._say(json.dumps({"data": []} if path.endswith("/events") else session))

        def _say(self, body: str, media_type: str = "application/json", *, is_last: bool = False) -> None:
            self.send_response(200)
            self.send_header("content-type", media_type)
            self.send_header(*(("connection", "close") if is_last else ("content-length", str(len(body)))))
            self.end_headers()
            self.wfile.write(body.encode())

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
            answer = model.answer(self.path.partition("?")[0], request)
            is_stream = "content" in answer and bool(request.get("stream"))
            if is_stream:
                self._say(_events(answer), "text/event-stream")
            else:
                self._say(json.dumps(answer))

    return Handler


@contextmanager
def scripted(*turns: Turn) -> Iterator[ScriptedModel]:
    """Serve a script while the block lasts."""
    model = ScriptedModel(turns)
    try:
        yield model
    finally:
        model.close()
