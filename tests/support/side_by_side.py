"""`make bench-engines`: headrace beside llama-cpp-python's server, in one run on this machine."""

import subprocess
import sys
import tempfile
from pathlib import Path

from headrace.live.machine import machine_facts
from support.llama_cpp_server import llama_cpp_server

# It has no field that ignores the end of text: its two ends are made impossible instead.
OWN_EXTRA, OTHERS_EXTRA = '{"ignore_eos": true}', '{"logit_bias": {"0": -100, "2": -100}}'
OUT = "build/side-by-side.json"


def main(arguments: list[str]) -> int:
    """Both compute the default model's file with as many threads, one after the other."""
    threads = machine_facts().num_cores
    log = Path(tempfile.mkdtemp(prefix="headrace-side-by-side-")) / "engine.log"
    print(f"llama-cpp-python's log: {log}", file=sys.stderr)
    with llama_cpp_server(log, threads=threads, context=4096) as engine:
        command = ["headrace.cli.main", "bench", "all", "--against", engine.url, "--out", OUT]
        extras = ["--extra", OWN_EXTRA, "--extra", OTHERS_EXTRA]
        return subprocess.run([sys.executable, "-m", *command, *extras, *arguments]).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
