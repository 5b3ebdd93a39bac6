"""A server of scripted models on the loopback: Anthropic's messages and OpenAI's responses, as the real clients ask.

A script is a list of turns. A turn is a text, or a tool use: the tool's name and its input. The server answers each
request with the next turn, and keeps the requests. So examples run as they are: only the address is another.
"""

from __future__ import annotations

import json
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
            messages = request.get("messages") or request.get("input") or []
            for each in messages if isinstance(messages, list) else ():
                parts = each["content"] if isinstance(each.get("content"), list) else [each]
                found |= {part["tool_use_id"]: part for part in parts if part.get("type") == "tool_result"}
                if each.get("type") == "function_call_output":
                    found[each["call_id"]] = each
        return list(found.values())

    def texts(self) -> list[str]:
        """The same as texts."""
        return [_text(each.get("content", each.get("output"))) for each in self.results()]

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, which is the next turn in the form that its path stands for."""
        self.requests.append(request)
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

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = model.answer(self.path.partition("?")[0], request)
            is_stream = "content" in answer and bool(request.get("stream"))
            body = (_events(answer) if is_stream else json.dumps(answer)).encode()
            self.send_response(200)
            self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


@contextmanager
def scripted(*turns: Turn) -> Iterator[ScriptedModel]:
    """Serve a script while the block lasts."""
    model = ScriptedModel(turns)
    try:
        yield model
    finally:
        model.close()
