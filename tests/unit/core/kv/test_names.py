"""Block names are a format: these vectors must never change under the version "kvh1"."""

import subprocess
import sys

from headrace.core.kv.names import BlockChain, child_name, hash_blocks, root_name

ROOT = root_name("00" * 32, "bf16", 16, "", "")


def test_vectors() -> None:
    assert ROOT.hex() == "1eaefa225eb2d96237bd3b104381c9d6"
    first = child_name(ROOT, range(16))
    assert first.hex() == "558c698473405195c8d40fb694c8cecd"
    assert child_name(first, [49151] * 16).hex() == "3ca68ed535a8091d024fe7e1bca46ed5"
    assert (
        root_name("ab", "bf16", 16, "adapter", "tenant").hex() == "cfb53a4cc75d315f698f8b6484f1a704"
    )


def test_every_field_tells_roots_apart() -> None:
    roots = {
        root_name("m", "bf16", 16, "", ""),
        root_name("n", "bf16", 16, "", ""),
        root_name("m", "int8", 16, "", ""),
        root_name("m", "bf16", 32, "", ""),
        root_name("m", "bf16", 16, "a", ""),
        root_name("m", "bf16", 16, "", "a"),
        root_name(
            "mb", "f16", 16, "", ""
        ),  # the same bytes as the first, were fields not length-prefixed
    }
    assert len(roots) == 7


def test_chain_names_full_blocks_only_and_each_once() -> None:
    chain = BlockChain(ROOT, 4)
    tokens = [1, 2, 3]
    chain.extend(tokens)
    assert chain.names == []
    for token in range(4, 14):
        tokens.append(token)
        chain.extend(tokens)
    whole = BlockChain(ROOT, 4)
    whole.extend(tokens)
    assert chain.names == whole.names
    assert len(whole.names) == 3
    assert whole.names[1] == child_name(whole.names[0], tokens[4:8])


def test_names_do_not_depend_on_the_hash_seed() -> None:
    script = (
        "from headrace.core.kv.names import *; print(root_name('m', 'bf16', 16, 'a', 's').hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert outputs == {root_name("m", "bf16", 16, "a", "s").hex() + "\n"}


def test_a_prompt_that_was_named_a_moment_ago_keeps_its_names_to_itself() -> None:
    prompt = tuple(range(40))
    first = BlockChain.of(ROOT, 4, prompt)
    names = first.names.copy()
    first.extend([*prompt, 1, 2, 3, 4])
    assert BlockChain.of(ROOT, 4, prompt).names == names
    assert BlockChain.of(ROOT, 8, prompt).names == hash_blocks(ROOT, prompt, 0, 8)[0]
    other = root_name("m", "bf16", 4, "", "")
    assert BlockChain.of(other, 4, prompt).names == hash_blocks(other, prompt, 0, 4)[0]
