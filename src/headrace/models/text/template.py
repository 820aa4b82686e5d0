"""Chat templates: a conversation to the text that a model was trained on.

A template comes with a model file and is not trusted. It runs in a process of its own, sandboxed,
bounded in time, memory and output; here is what is asked of it, and what its failures mean.
"""

from hashlib import sha256
from json import dumps
from typing import Any
from weakref import finalize

from headrace.core.base.errors import ConfigError, RequestError
from headrace.models.text.template_process import Reply, TemplateProcess, WorkerLate, WorkerLost
from headrace.models.text.template_wire import Kind, Limits, to_bytes

MAX_SOURCE_CHARS = 1 << 20

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
"""Names that a client's own template arguments may not take."""

_OTHER = "another template can be named: `--chat-template FILE`, or the setting model.chat_template"


class ChatTemplate:
    """A template and the process that renders it. Thread-safe; one rendering at a time.

    The process ends with `close`, when the object is collected, or at exit.
    """

    def __init__(
        self, source: str, *, bos_token: str, eos_token: str, limits: Limits | None = None
    ) -> None:
        """Does not wait for the process; `check` does. ConfigError where there can be none."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
        given = dumps([source, bos_token, eos_token]).encode()
        self.digest = sha256(given).hexdigest()  # of all that decides what it renders
        self._limits = limits or Limits()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._process = TemplateProcess(source, self._limits)
        except OSError as error:
            raise ConfigError(f"cannot start a process for the chat template: {error}") from None
        self._finalizer = finalize(self, self._process.close)

    def check(self) -> None:
        """Wait until the template is compiled. ConfigError where the source is none."""
        try:
            reply = self._process.start()
        except WorkerLate:
            reason = f"it takes longer than {self._limits.start_s:g} s"
        except WorkerLost as error:
            reason = f"the process for it is lost: {error}"
        else:
            if reply.kind is Kind.READY:
                return
            reason = self._too_large() if reply.kind is Kind.NO_MEMORY else reply.text
        raise ConfigError(f"the chat template cannot be compiled: {reason}", hint=_OTHER)

    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt. Blocks until it is there, and for those that came before.

        RequestError where the messages are no plain data, where the template refuses them or fails
        on them, and, with status 500, where it exceeds its time or memory.
        """
        taken = RESERVED & kwargs.keys()
        if taken:
            raise RequestError(
                f"{min(taken)!r} is not a free name of the chat template",
                param="chat_template_kwargs",
            )
        given = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._text(self._asked(_payload(kwargs | self._tokens | given)))

    def close(self) -> None:
        """End the process; a rendering under way fails. Idempotent."""
        self._finalizer()

    def _asked(self, names: bytes) -> Reply:
        try:
            return self._process.render(names)
        except WorkerLate:
            raise _overrun(
                f"the chat template takes longer than {self._limits.render_s:g} s"
            ) from None
        except WorkerLost as error:
            raise _overrun(f"the process of the chat template is lost: {error}") from None

    def _text(self, reply: Reply) -> str:
        match reply.kind:
            case Kind.TEXT:
                return reply.text
            case Kind.REFUSED:
                raise RequestError(reply.text, param="messages", code="chat_template")
            case Kind.FAILED:
                raise RequestError(
                    f"the chat template failed on these messages: {reply.text}",
                    param="messages",
                    code="chat_template",
                )
            case Kind.NO_MEMORY:
                raise _overrun(f"the chat template failed: {self._too_large()}")
            case _:
                raise _overrun("the process of the chat template said what it should not")

    def _too_large(self) -> str:
        return f"it needs more than {self._limits.memory_bytes >> 20} MiB of memory"


def _overrun(message: str) -> RequestError:
    return RequestError(
        message, status_hint=500, param="messages", code="chat_template", hint=_OTHER
    )


def _payload(names: dict[str, Any]) -> bytes:
    try:
        return to_bytes(dumps(names, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"the messages are not plain data: {error}", param="messages", code="invalid_value"
        ) from None
