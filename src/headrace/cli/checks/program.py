"""The program itself: the interpreter, the backends, the port."""

import platform
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from headrace.cli.checks import Check, Status
from headrace.core.base.errors import ConfigError
from headrace.core.config.resolve import check_device
from headrace.core.config.schema import Config
from headrace.core.scheduler import scheduler
from headrace.live.machine import usable_isas

LEAST_PYTHON = (3, 11)


def check_python(config: Config) -> Iterator[Check]:
    version = platform.python_version()
    detail = f"{platform.python_implementation()} {version} on {platform.system()}"
    data = {"version": version, "executable": sys.executable}
    if sys.version_info < LEAST_PYTHON:
        yield Check("python", Status.FAIL, detail, "install Python 3.11 or newer", data)
    else:
        yield Check("python", Status.OK, detail, data=data)


def check_native(config: Config) -> Iterator[Check]:
    """The compiled extension, and the instruction sets it may use here."""
    is_needed = config.device.backend == "native"
    try:
        from headrace.ops.native import _native

        isas, fastest = list(_native.usable_isas()), _native.fastest_isa()
        refusal = _native.amx_refusal()
    except (ImportError, AttributeError) as error:  # not built, or from other sources
        status = Status.FAIL if is_needed else Status.OK
        hint = "build it with pip install ." if is_needed else ""
        yield Check("native", status, f"the native backend cannot be used: {error}", hint)
        return
    isa = fastest if config.device.isa == "auto" else config.device.isa
    detail = f"{isa} chosen of {', '.join(isas)}"
    data = {"isa": isa, "usable_isas": isas}
    try:
        check_device(config.device, usable_isas())
    except ConfigError as error:
        yield Check("native", Status.FAIL, error.message, error.hint, data)
        return
    if isa == "portable":
        hint = "much slower than avx2; this CPU or this build has nothing better"
        yield Check("native", Status.WARN, detail, hint, data)
    elif refusal and config.device.isa == "auto":
        hint = "prompts take longer; whatever starts headrace may give threads larger signal stacks"
        yield Check("native", Status.WARN, f"{detail}; no amx, as {refusal}", hint, data)
    else:
        yield Check("native", Status.OK, detail, data=data)


def check_core(config: Config) -> Iterator[Check]:
    """Whether decisions are taken by compiled modules or by the Python that they are made from."""
    if Path(scheduler.__file__).suffix == ".py":
        detail = "interpreted: what is in the source folder is what runs"
        yield Check("core", Status.OK, detail, data={"is_compiled": False})
    else:
        yield Check("core", Status.OK, "compiled", data={"is_compiled": True})


def check_torch(config: Config) -> Iterator[Check]:
    """Found by its metadata: importing it takes seconds."""
    if util.find_spec("torch") is not None:
        version = metadata.version("torch")
        yield Check("torch", Status.OK, f"{version} is installed", data={"version": version})
    elif config.device.backend == "torch":
        hint = "pip install '.[torch]' in headrace's checkout, or --backend native"
        yield Check("torch", Status.FAIL, "not installed, but chosen as backend", hint)
    else:
        yield Check("torch", Status.OK, "not installed, and not needed", data={"version": None})


def check_port(config: Config) -> Iterator[Check]:
    """Taken and given back at once."""
    from headrace.server.listener import bind

    host, port = config.server.host, config.server.port
    data = {"host": host, "port": port}
    try:
        bind(host, port).close()
    except ConfigError as error:
        yield Check("port", Status.FAIL, error.message, error.hint, data)
        return
    detail = f"{host} port {port} is free" if port else f"{host}, any free port"
    yield Check("port", Status.OK, detail, data=data)
    if host not in ("127.0.0.1", "::1", "localhost"):
        hint = "there is no authentication; put a proxy that has it in front"
        yield Check("address", Status.WARN, f"{host} can be reached from elsewhere", hint, data)
