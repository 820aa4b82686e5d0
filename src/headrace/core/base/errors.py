"""The error tree, sorted by who must act.

HeadraceError
  ConfigError      the operator: a setting or a file is wrong (exit code 2); lists all faults found
  RequestError     the client: the request is wrong (HTTP 4xx)
  OverloadError    the client, later: there is no room now (HTTP 429 / 503 with Retry-After)
  DeviceError      the executor failed; its sequences can be recomputed
  TransferError    a KV copy failed; its blocks can be recomputed
  InvariantError   us: a law of the core is broken; the worker stops and keeps its event log

A message is lower case, carries the value and the limit, and has no full stop; `hint` says what to
do.
"""


class HeadraceError(Exception):
    """Base of all errors; `data` holds the values named in the message."""

    def __init__(self, message: str, *, hint: str = "", **data: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.data = data

    def __str__(self) -> str:
        facts = ", ".join(f"{name}={value}" for name, value in self.data.items())
        text = f"{self.message} ({facts})" if facts else self.message
        return f"{text}\nhint: {self.hint}" if self.hint else text


class ConfigError(HeadraceError):
    """A setting, path or model file that the operator must change."""


class RequestError(HeadraceError):
    """A request that can never succeed as it is; `param` names the offending field."""

    def __init__(
        self,
        message: str,
        *,
        status_hint: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        hint: str = "",
        **data: object,
    ) -> None:
        super().__init__(message, hint=hint, **data)
        self.status_hint = status_hint
        self.code = code
        self.param = param


class OverloadError(HeadraceError):
    """There is no room now; the client may come back after `retry_after_s`."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float,
        status_hint: int = 503,
        hint: str = "",
        **data: object,
    ) -> None:
        super().__init__(message, hint=hint, **data)
        self.retry_after_s = retry_after_s
        self.status_hint = status_hint


class DeviceError(HeadraceError):
    """An executor could not run a step."""


class TransferError(HeadraceError):
    """A KV copy did not arrive whole."""


class InvariantError(HeadraceError):
    """A law of the core is broken: our bug, never a client's."""
