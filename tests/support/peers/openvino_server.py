"""The completions endpoint over OpenVINO GenAI's continuous batching, as far as loads ask for it:
greedy, one text prompt, streamed, with usage.

    python openvino_server.py FOLDER --port N --threads N --name MODEL

Runs in the engine's environment. A thread steps the engine as long as there is work; all else is
on the event loop. It refuses to know any other engine.
"""

import argparse
import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import openvino_genai as genai
from aiohttp import web

KV_GB = 2
HALF_A_CHARACTER = "\ufffd"
Sink = Callable[[list[int] | None], None]  # tokens as they come, None at the end


class Engine:
    """`ask` and `forget` may be called by anybody; sinks are called by the engine's thread."""

    def __init__(self, folder: str, threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = KV_GB
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(
            folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self.tokenizer = self._pipeline.get_tokenizer()
        self._changed = threading.Condition()
        self._new: list[tuple[Any, Any, Sink]] = []
        self._gone: set[Sink] = set()
        self._num_asked = 0

    def ask(self, prompt: Any, config: Any, sink: Sink) -> None:
        with self._changed:
            self._new.append((prompt, config, sink))
            self._changed.notify()

    def forget(self, sink: Sink) -> None:
        """Nobody reads its answer any more, if it has not ended."""
        with self._changed:
            self._gone.add(sink)

    def run(self) -> None:
        live: dict[Sink, Any] = {}
        while True:
            with self._changed:
                while not self._new and not live:
                    self._gone.clear()
                    self._changed.wait()
                new, self._new = self._new, []
                gone, self._gone = self._gone, set()
            for prompt, config, sink in new:
                self._num_asked += 1
                live[sink] = self._pipeline.add_request(self._num_asked, prompt, config)
            for sink in gone & live.keys():
                live.pop(sink).cancel()
            self._pipeline.step()
            for sink, handle in list(live.items()):
                is_running = handle.get_status() == genai.GenerationStatus.RUNNING
                while handle.can_read():
                    for output in handle.read().values():
                        sink(list(output.generated_ids))
                if not is_running:
                    del live[sink]
                    sink(None)


class Server:
    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.get("/v1/models", self.models)])
        app.add_routes([web.post("/v1/completions", self.complete)])
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._model}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        loop, tokens = asyncio.get_running_loop(), asyncio.Queue[list[int] | None]()

        def sink(came: list[int] | None) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, came)

        tokenizer = self._engine.tokenizer
        prompt = tokenizer.encode(body["prompt"], add_special_tokens=False).input_ids
        config = genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        config.ignore_eos = bool(body.get("ignore_eos"))
        if not config.ignore_eos:
            config.eos_token_id = tokenizer.get_eos_token_id()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        num_tokens, held = 0, list[int]()
        self._engine.ask(prompt, config, sink)
        try:
            while (came := await tokens.get()) is not None:
                num_tokens += len(came)
                held += came
                text = tokenizer.decode(held)
                if text.endswith(HALF_A_CHARACTER):
                    text = ""
                else:
                    held = []
                await _send(response, choices=[_choice(text, None)])
            is_cut = num_tokens == body["max_tokens"]
            await _send(response, choices=[_choice("", "length" if is_cut else "stop")])
            usage = {"prompt_tokens": prompt.shape[1], "completion_tokens": num_tokens}
            await _send(response, choices=[], usage=usage)
            await response.write(b"data: [DONE]\n\n")
        finally:
            self._engine.forget(sink)
        return response


def _choice(text: str, finish_reason: str | None) -> dict[str, object]:
    return {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}


async def _send(response: web.StreamResponse, **fields: object) -> None:
    event = {"id": "cmpl", "object": "text_completion", **fields}
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("folder")
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--threads", type=int, required=True)
    flags.add_argument("--name", required=True)
    asked = flags.parse_args()
    engine = Engine(asked.folder, asked.threads)
    threading.Thread(target=engine.run, daemon=True).start()
    # A client that hangs up ends its request, as it does elsewhere.
    web.run_app(
        Server(engine, asked.name).app(),
        host="127.0.0.1",
        port=asked.port,
        handler_cancellation=True,
        print=None,
    )


if __name__ == "__main__":
    main()
