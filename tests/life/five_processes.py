"""The five programs of a cluster as children of the test, without a supervisor, so that a test can end, stop, exchange and restart
each of them; and a client that counts what a stream says. Ports are free ones that stay the same over restarts."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.environ.get("TWINSPARK_BIN", os.path.join(CHECKOUT, "build/release/bin"))
MODEL_DIR = os.path.join(CHECKOUT, "deploy/demo_model")
sys.path.insert(0, os.path.join(CHECKOUT, "tests/e2e"))
from reflection import ReflectedServer  # noqa: E402

START_SECONDS = 60
LISTEN_FLAGS = {"engram_service": "--engram-listen", "shard_worker": "--worker-listen", "gateway": "--port"}


def wait_until(condition, seconds, what):
    """Seconds until it held."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds} s: {what() if callable(what) else what}"
        time.sleep(0.01)
    return time.monotonic() - start


class Part:
    """One program: `name` is the program's, with the rank where there are two of them."""

    def __init__(self, name, flags, run_dir, program=None, env=None):
        self.name = name
        self.kind = name.split("-")[0]
        self.flags = flags
        self.run_dir = run_dir
        self.program = program or os.path.join(BIN, self.kind)
        self.env = env or {}
        self.address = "127.0.0.1:0"
        self.process = None

    @property
    def log_path(self):
        return os.path.join(self.run_dir, self.name + ".log")

    def log(self):
        with open(self.log_path, errors="replace") as file:
            return file.read()

    def start(self, wait=True):
        port_file = os.path.join(self.run_dir, self.name + ".port")
        if os.path.exists(port_file):
            os.remove(port_file)
        listen = self.address if self.kind != "gateway" else self.address.rsplit(":", 1)[1]
        read_end, self.lifeline = os.pipe()  # the program ends when this process does
        command = [self.program, LISTEN_FLAGS[self.kind], listen, "--port-file", port_file, "--lifeline-fd", str(read_end), *self.flags]
        with open(self.log_path, "a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, pass_fds=[read_end], env={**os.environ, **self.env})
        os.close(read_end)
        if wait:
            wait_until(lambda: os.path.exists(port_file) or self.process.poll() is not None, START_SECONDS, lambda: self.name + " listens\n" + self.log())
            assert self.process.poll() is None, self.log()
            with open(port_file) as file:
                self.address = file.read().strip()

    def end(self):
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.lifeline)
        self.process = None

    def signal(self, number):
        self.process.send_signal(number)

    def exit_code(self, seconds):
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {seconds} s:\n{self.log()}") from None

    def error_lines(self):
        return [line for line in self.log().splitlines() if " ERROR " in line]

    def call(self, method, request=None):
        server = ReflectedServer(self.address)
        try:
            service = next(name for name in server.services() if not name.startswith("grpc.") and "TestHooks" not in name)
            hooks = service + "TestHooks"
            return server.call(f"{hooks if method == 'FlipBit' else service}/{method}", request)
        finally:
            server.close()


class FiveProcesses:
    """Programs with their usual flags; `flags` and `env` add to those of a part, by its name."""

    def __init__(self, run_dir, model_dir=MODEL_DIR, flags=None, env=None, programs=None):
        self.run_dir = str(run_dir)
        flags, env, programs = flags or {}, env or {}, programs or {}

        def part(name, own):
            return Part(name, own + flags.get(name, []), self.run_dir, programs.get(name), env.get(name))

        self.engrams = [part(f"engram_service-{rank}", ["--model-dir", model_dir, "--engram-rank", str(rank), "--engram-world", "2"])
                        for rank in range(2)]
        self.workers = [part(f"shard_worker-{rank}", ["--compute-threads", "1"]) for rank in range(2)]
        self.gateway = part("gateway", ["--model-dir", model_dir, "--listen-addr", "127.0.0.1"])

    def parts(self):
        return [*self.engrams, *self.workers, self.gateway]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for part in self.parts():
            if part.process is not None and part.process.poll() is None:
                part.signal(signal.SIGCONT)
            part.end()

    def start(self, wait=True):
        """Rows and workers, then the gateway; without `wait` it may fail to come up."""
        for part in [*self.engrams, *self.workers]:
            part.start()
        self.start_gateway(wait)
        if wait:
            self.wait_ready()

    def start_gateway(self, wait=True):
        if "--workers" not in self.gateway.flags:
            self.gateway.flags += ["--workers", ",".join(part.address for part in self.workers)]
        if "--engram-endpoints" not in self.gateway.flags:
            self.gateway.flags += ["--engram-endpoints", ",".join(part.address for part in self.engrams)]
        self.gateway.start(wait)

    @property
    def url(self):
        return "http://" + self.gateway.address

    def health(self, timeout=1.0):
        """(status, body); (None, why) when nobody answers."""
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=timeout) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except OSError as error:
            return None, str(error)

    def status(self):
        with urllib.request.urlopen(self.url + "/status", timeout=10) as reply:
            return json.loads(reply.read())

    def wait_ready(self, seconds=START_SECONDS):
        return wait_until(lambda: self.health()[0] == 200, seconds, lambda: f"ready: {self.health()}")

    def logs(self):
        return {part.name: part.log() for part in self.parts()}


class Stream(threading.Thread):
    """A streamed chat: token ids, error events and how it ended, as they come."""

    def __init__(self, cluster, content, max_tokens=3000, **fields):
        super().__init__(daemon=True)
        host, port = cluster.gateway.address.rsplit(":", 1)
        self.connection = http.client.HTTPConnection(host, int(port), timeout=120)
        self.body = {"model": "DeepSeek-v4.1-Flash-EXL3", "messages": [{"role": "user", "content": content}], "stream": True, "temperature": 0,
                     "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False},
                     **fields}
        self.tokens = []
        self.num_steps = 0  # events with tokens: one per op that brought this stream any
        self.errors = []
        self.status = None
        self.end = None  # "done", or why the connection ended
        self.start()

    def run(self):
        try:
            self.connection.request("POST", "/v1/chat/completions", json.dumps(self.body), {"Content-Type": "application/json"})
            reply = self.connection.getresponse()
            self.status = reply.status
            if reply.status != 200:
                self.errors.append(json.loads(reply.read())["error"])
                self.end = f"HTTP {reply.status}"
                return
            for line in reply:
                self.take(line)
            self.end = self.end or "closed"
        except (OSError, http.client.HTTPException) as error:
            self.end = type(error).__name__
        finally:
            self.connection.close()

    def take(self, line):
        if line.startswith(b"data: [DONE]"):
            self.end = "done"
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                self.errors.append(event["error"])
            ids = [token for choice in event.get("choices", []) for token in choice.get("token_ids") or []]
            self.num_steps += bool(ids)
            self.tokens += ids

    def wait_tokens(self, count, seconds=START_SECONDS):
        wait_until(lambda: len(self.tokens) >= count or self.end is not None, seconds, f"{count} tokens")
        assert len(self.tokens) >= count, (self.end, self.errors)

    def finish(self, seconds):
        """Waits for the end; fails when nothing came for so many seconds (a slow machine is no fault)."""
        heard = -1
        while self.is_alive() and heard < len(self.tokens):
            heard = len(self.tokens)
            self.join(seconds)
        assert self.end is not None, f"the stream is open, and no token came for {seconds} s after {len(self.tokens)} tokens"


def one_line_with(text, *needles):
    """The one ERROR line that has all of them."""
    lines = [line for line in text.splitlines() if " ERROR " in line and all(re.search(needle, line) for needle in needles)]
    assert lines, f"no ERROR line with {needles} in:\n{text}"
    return lines[-1]
