"""What llama.cpp takes without a server, in llama-cpp-python's environment.

    python llama_cpp_alone.py FILE.gguf --threads 2 --prompt 512 --output 128 --rounds 3

A prompt in one batch, then token by token; nothing is sampled. Figures are JSON.
"""

import argparse
import json
import time
from statistics import median

import llama_cpp


def measure(llama: "llama_cpp.Llama", num_prompt: int, num_output: int) -> tuple[float, float]:
    """Seconds of the prompt, and of the median token."""
    llama.reset()
    tokens = [1000 + index % 1000 for index in range(num_prompt)]
    begin_s = time.perf_counter()
    llama.eval(tokens)
    prompt_s = time.perf_counter() - begin_s
    token_s = []
    for index in range(num_output):
        begin_s = time.perf_counter()
        llama.eval([2000 + index])
        token_s.append(time.perf_counter() - begin_s)
    return prompt_s, median(token_s)


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("file")
    flags.add_argument("--threads", type=int, required=True)
    flags.add_argument("--prompt", type=int, default=512)
    flags.add_argument("--output", type=int, default=128)
    flags.add_argument("--rounds", type=int, default=3)
    asked = flags.parse_args()
    llama = llama_cpp.Llama(
        asked.file,
        n_ctx=asked.prompt + asked.output,
        n_batch=asked.prompt,
        n_ubatch=asked.prompt,
        n_threads=asked.threads,
        n_threads_batch=asked.threads,
        verbose=False,
    )
    measure(llama, asked.prompt, 1)  # touches code and memory
    rounds = [measure(llama, asked.prompt, asked.output) for _ in range(asked.rounds)]
    prompts_s, tokens_s = zip(*rounds, strict=True)
    figures = {"prompt_ms": 1e3 * median(prompts_s), "token_ms": 1e3 * median(tokens_s)}
    print(json.dumps({"version": llama_cpp.__version__, **vars(asked), **figures}))


if __name__ == "__main__":
    main()
