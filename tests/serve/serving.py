"""A server's process with a small random model, for tests that query it over HTTP."""

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
from forked import Forked
from models import make_model, make_sizes
from paths import ROOT

TOKENIZER = ROOT / "examples" / "tiny-relu" / "tokenizer.json"
CONTEXT = 256
TEMPLATE = """\
{%- if tools %}
{{- 'Tools: ' + tools | tojson + ' as <tool_call>{"name": ..., "arguments": ...}\n' }}
{%- endif %}
{%- for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments['a'] }}{% endfor %}
{%- endfor %}
{%- if enable_shouting %}{{ 'SHOUT\n' }}{% endif %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = r'root ::= "Well. <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>"'
SAID = [{"role": "user", "content": "Hello"}]


def save_model(
    folder, *, tokenizer=None, template=TEMPLATE, vocab_size=4096, context_length=CONTEXT, **more
):
    """Saves a model with random weights and a real tokenizer; token 0 ends a text. `more`: further
    keys of the file; None leaves one out."""
    keys = {
        "tokenizer.huggingface.json": tokenizer or TOKENIZER.read_text(encoding="utf-8"),
        "tokenizer.ggml.eos_token_id": np.uint32(0),
        "tokenizer.chat_template": template,
        **more,
    }
    keys = {key: value for key, value in keys.items() if value is not None}
    shape = make_sizes(vocab_size=vocab_size, context_length=context_length)
    path = folder / "tiny.gguf"
    model = make_model(sizes=shape, kind="q8_0", extra_keys=keys)
    dataclasses.replace(model, path=path).save(path)
    return path


def text_of_chunks(chunks):
    """The text of a streamed chat with one choice."""
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


class Served:
    """A server's process, which the end of a `with` block ends. `url` does not include /v1."""

    def __init__(self, model, *options, key=None):
        self.key = key
        arguments = [str(model), "--port", "0", "--json", "--threads", "1", *options]
        (read, out), (read_log, error) = os.pipe(), os.pipe()
        with Path(os.devnull).open() as nothing:
            self.process = Forked(["serve", *arguments], (nothing.fileno(), out, error))
        os.close(out)
        os.close(error)
        self.log = []
        threading.Thread(target=self._read_log, args=(read_log,), daemon=True).start()
        with os.fdopen(read) as said:
            line = said.readline()
        assert line, self.log
        self.start = json.loads(line)
        self.url = self.start["url"]
        self.port = int(self.url.rpartition(":")[2])

    def _read_log(self, read_log):
        with os.fdopen(read_log) as lines:
            self.log.extend(lines)

    def ask(self, path, body=None, *, method=None, headers=None, raw=None):
        """(status, the body, parsed if it is JSON)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            sent = raw if raw is not None else None if body is None else json.dumps(body)
            given = {"Content-Type": "application/json"} if sent is not None else {}
            if self.key:
                given["Authorization"] = f"Bearer {self.key}"
            method = method or ("GET" if sent is None else "POST")
            connection.request(method, path, sent, given | (headers or {}))
            answer = connection.getresponse()
            content = answer.read()
            self.headers = dict(answer.getheaders())
            with contextlib.suppress(ValueError):
                return answer.status, json.loads(content)
            return answer.status, content.decode()

    def chat(self, **fields):
        status, answer = self.ask("/v1/chat/completions", {"messages": SAID, **fields})
        assert status == 200, answer
        return answer

    def stream(self, path, body):
        """The objects of a stream, whose last line is [DONE]."""
        status, text = self.ask(path, {**body, "stream": True})
        assert status == 200, text
        *lines, last = [line for line in text.split("\n\n") if line]
        assert last == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def metric(self, name):
        _, page = self.ask("/metrics")
        found = [line.split()[-1] for line in page.splitlines() if line.startswith(name)]
        return sum(map(float, found))

    def until(self, is_true, seconds=30):
        end = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < end, self.log[-5:]
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()  # if it did not end


def leave(served, body, num_read=20):
    """Reads the first bytes of an answer and closes the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    if num_read:
        connection.getresponse().read(num_read)
    connection.close()
