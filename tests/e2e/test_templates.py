"""Would catch: a chat whose text is another one than transformers makes of the same messages with the model's template
(another prompt is another answer); a template that is at fault and takes the server, or its other requests, with it.

The reference is jinja2, set up as transformers sets it up. The templates are those that come with llama.cpp's sources,
and lie where scripts/setup unpacked them.
"""

import json
import socket
import struct
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import pytest
from conftest import CHAT, COMPLETIONS, MODEL_NAME, Launcher, chat, prompt
from jinja2.sandbox import ImmutableSandboxedEnvironment
from terrace_stack import Server, from_setup, terrace_binary
from tiny_gguf import mamba

TEMPLATES = sorted(from_setup("LLAMA_DIR", "scripts/setup", "source/models/templates").glob("*.jinja"))


# --- the reference ----------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; the text stays."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )  # jinja2's own escapes HTML.


REFERENCE = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
)
REFERENCE.filters["tojson"] = _tojson
REFERENCE.globals["raise_exception"] = _raise
REFERENCE.globals["strftime_now"] = lambda form: datetime.now().strftime(form)


def variables(messages: list, **more) -> dict:
    return {
        "messages": messages,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        "bos_token": "<BOS>",
        "eos_token": "<EOS>",
        **more,
    }


class Worker:
    """The process in which `terrace serve` runs templates (src/engine/template_worker.cc)."""

    TEMPLATE, VARIABLES, TEXT = 1, 2, 3

    def __init__(self, source: str):
        self.socket, theirs = socket.socketpair()
        self.process = subprocess.Popen([terrace_binary(), "template-worker"], stdin=theirs)
        theirs.close()
        self.socket.settimeout(60)
        assert self.ask(self.TEMPLATE, source) == (True, "")

    def ask(self, kind: int, text: str) -> tuple[bool, str]:
        """Whether it worked, and the text or what is wrong."""
        data = text.encode()
        self.socket.sendall(struct.pack("<QQ", kind, len(data)) + data)
        kind, size = struct.unpack("<QQ", self._receive(16))
        return kind == self.TEXT, self._receive(size).decode()

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += (piece := self.socket.recv(size - len(data)))
            assert piece, "the worker ended"
        return data

    def close(self) -> None:
        self.socket.close()
        assert self.process.wait(30) == 0


# --- conversations ----------------------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief.\nSpeak  plainly. "}
USER = {"role": "user", "content": "What is 2 + 2? <b>\"é\" 'x' \U0001f600"}
ASSISTANT = {"role": "assistant", "content": " It is 4.\n\nReally. "}
AGAIN = {"role": "user", "content": "  And 3?\n"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a <city> & more",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "é"},
                    "days": {"type": "integer", "enum": [1, 2]},
                },
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"city": "Paris", "days": 2}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    ],
}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": '{"t": 20.5}'}

TALKS = {
    "one": [USER],
    "with a system message": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ASSISTANT, AGAIN],
    "turns without a system message": [USER, ASSISTANT, AGAIN],
}
CONVERSATIONS = [
    *((f"{name} {more}", variables(talk, **more))
      for name, talk in TALKS.items()
      for more in ({}, {"tools": TOOLS}, {"add_generation_prompt": False}, {"enable_thinking": False})),
    ("a call", variables([USER, CALL, RESULT, ASSISTANT, AGAIN], tools=TOOLS)),
    ("a call just answered", variables([SYSTEM, USER, CALL, RESULT])),
]  # fmt: skip

# Here |safe makes markup of text, and jinja2 escapes what is put behind it, to "&lt;city&gt;". No model was trained on
# that.
ESCAPES_TOOLS = "meetkai-functionary-medium-v3.1"
# They want variables that the conversations here do not have, and stop without.
WANT_MORE = {"fireworks-ai-llama-3-firefunction-v2", "CohereForAI-c4ai-command-r-plus-tool_use"}


@pytest.mark.parametrize("path", TEMPLATES, ids=[path.stem for path in TEMPLATES])
def test_a_template_gives_the_text_that_transformers_gives(path: Path):
    """Where that raises an error of the template's own, so does this; where it stumbles over a type, this may go on."""
    source = path.read_text()
    reference, worker = REFERENCE.from_string(source), Worker(source)
    compared = 0
    for name, given in CONVERSATIONS:
        if path.stem == ESCAPES_TOOLS and given["tools"]:
            continue
        works, text = worker.ask(Worker.VARIABLES, json.dumps(given))
        try:
            expected = reference.render(**given)
        except jinja2.UndefinedError:
            continue
        except jinja2.TemplateError as error:
            if not isinstance(error, jinja2.sandbox.SecurityError):
                assert (works, text) == (False, error.message), name
            continue
        except TypeError:
            continue
        assert (works, text) == (True, expected), name
        compared += 1
    worker.close()
    assert compared >= (0 if path.stem in WANT_MORE else 4)


def test_the_templates_are_of_many_families():
    assert len(TEMPLATES) >= 60


# --- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(session_launcher: Launcher) -> Server:
    return session_launcher.serve()


def gguf_text(path: Path, key: str) -> str:
    """A text of a GGUF's header."""
    with open(path, "rb") as file:
        data = file.read(16 << 20)
    at = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)
    kind, size = struct.unpack_from("<IQ", data, at)
    assert kind == 8
    return data[at + 12 : at + 12 + size].decode()


@pytest.fixture(scope="module")
def own_template(model_f16: Path) -> jinja2.Template:
    return REFERENCE.from_string(gguf_text(model_f16, "tokenizer.chat_template"))


def messages(*given: dict, **more) -> dict:
    return {"model": MODEL_NAME, "messages": list(given), "max_tokens": 24, "temperature": 0, **more}


@pytest.mark.parametrize(
    "talk", [[USER], [SYSTEM, USER], [USER, ASSISTANT, AGAIN]], ids=["alone", "system message", "turns"]
)
def test_a_chat_is_the_text_of_the_models_own_template(server: Server, own_template: jinja2.Template, talk: list):
    text = own_template.render(**variables(talk))
    as_text, as_chat = server.complete(prompt(text), COMPLETIONS), server.complete(messages(*talk))
    assert (as_chat.text, as_chat.prompt_tokens) == (as_text.text, as_text.prompt_tokens)


def test_the_default_system_message_is_there(server: Server):
    """SmolLM2's template puts one before a conversation that has none: 21 tokens."""
    assert server.lookup(chat("Name one colour."))["prompt_tokens"] == 34
    hello = {"role": "system", "content": ""}
    assert server.lookup(messages(hello, {"role": "user", "content": "Name one colour."}))["prompt_tokens"] < 34


def test_content_is_the_same_in_every_shape(server: Server):
    def tokens(content: str | list | None, **more) -> int:
        answer = {"role": "assistant", "content": content, **more}
        return server.lookup(messages(USER, answer, AGAIN))["prompt_tokens"]

    parts = [{"type": "text", "text": text} for text in ("one", "two", "three")]
    assert tokens("one\ntwo\nthree") == tokens(parts) == tokens([{"type": "text", "text": "one\ntwo\nthree"}])
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert tokens(None, tool_calls=call) == tokens("", tool_calls=call) == tokens("")


def test_an_answer_can_be_continued(server: Server, own_template: jinja2.Template):
    begun = {"role": "assistant", "content": "The answer, in one word, is"}
    text = own_template.render(**variables([USER, begun], add_generation_prompt=False))
    text = text[: text.rindex(begun["content"]) + len(begun["content"])]
    as_chat = server.complete(messages(USER, begun, continue_final_message=True, add_generation_prompt=False))
    as_text = server.complete(prompt(text), COMPLETIONS)
    assert (as_chat.text, as_chat.prompt_tokens) == (as_text.text, as_text.prompt_tokens)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),  # The last message is the user's.
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(server: Server, more: dict, param: str):
    reply = server.call("POST", CHAT, messages(USER, **more))
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


# --- templates at fault -----------------------------------------------------------------------------------------------


@pytest.fixture
def serve(launcher: Launcher, tmp_path: Path) -> Iterator:
    def start(template: str | None, *flags: str | Path) -> Server:
        model = mamba(tmp_path / "model.gguf", launcher.model, **{"tokenizer.chat_template": template})
        return launcher.serve("--ctx", "2048", *flags, model=model, ready=False).wait_healthy()

    return start


def refused(server: Server, **more) -> dict:
    """The error of a chat; other requests are served before and after it."""
    assert server.lookup(prompt("a b c"))["prompt_tokens"] > 0
    reply = server.call("POST", CHAT, messages(USER, **more))
    assert reply.status == 400, reply.body
    assert server.health() == {"status": "ok"}
    assert server.complete(prompt("a b c", 2), COMPLETIONS).prompt_tokens > 0
    return reply.json()["error"]


def test_what_a_template_raises_is_the_answer(serve):
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('Say who you are') }}{% endif %}x"
    server = serve(template)
    error = refused(server)
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "messages",
        "chat_template_failed",
    )
    assert error["message"] == "the model's chat template: Say who you are"
    assert server.lookup(messages(SYSTEM))["prompt_tokens"] == 1


@pytest.mark.parametrize(
    "endless",
    [
        "{% for a in range(9999999) %}{% for b in range(9999999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(s='aaaaaaaa') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    ],
    ids=["loop", "recursion", "memory"],
)
def test_a_template_without_end_is_one_refusal(serve, endless: str):
    server = serve("{% if go %}" + endless + "{% endif %}x")
    error = refused(server, chat_template_kwargs={"go": True})
    assert error["code"] == "chat_template_failed" and "template: it " in error["message"]
    assert server.lookup(messages(USER))["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "no chat template"),
        ("{% if %}", "chat template: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
        ("{{ " + "(" * 200_000, "without end"),
    ],
    ids=["none", "unreadable", "endless", "nested"],
)
def test_a_model_without_a_template_that_runs_serves_texts(serve, template: str | None, why: str):
    server = serve(template)
    error = refused(server)
    assert error["code"] == "chat_not_supported" and why in error["message"]
    [line] = [line for line in server.log.read_text().splitlines() if "event=no_chat" in line]
    assert why in line


def test_a_template_of_the_operators_own_is_used(serve, tmp_path: Path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    server = serve(None, "--chat-template-file", file)
    assert server.lookup(messages(USER))["prompt_tokens"] == server.lookup(prompt(USER["content"]))["prompt_tokens"]


def test_an_operators_template_that_does_not_work_is_one_line(model_f16: Path, tmp_path: Path):
    unreadable = tmp_path / "bad.jinja"
    unreadable.write_text("{% if %}")
    for file in (unreadable, tmp_path / "none.jinja"):
        command = [terrace_binary(), "serve", "--model", model_f16, "--port", "0", "--chat-template-file", file]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        [line] = [line for line in done.stderr.splitlines() if not line.startswith("time=")]
        assert done.returncode == 2 and "--chat-template-file" in line
