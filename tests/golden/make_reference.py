"""Writes data/reference.json: the default model's outputs as `transformers` computes them.

An independent implementation in every part: GGUF reading, dequantisation, tokenisation, template
and forward pass. Run it again only when the prompts change; the tests compare against the committed
file, and one slow test against `transformers` itself.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from golden.reference_prompts import CHATS, PROMPTS, TEXTS
from headrace.models.hub import DEFAULT_MODEL, ensure_default_model

DATA = Path(__file__).parent / "data"
NUM_TOKENS = 64
NUM_TOP = 4


def load_reference(path: Path) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer."""
    folder, name = str(path.parent), path.name
    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder, gguf_file=name)).float()
    loaded = load_gguf_checkpoint(
        str(path), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    if list(missing) != ["lm_head.weight"] or unexpected:
        raise RuntimeError(f"not the expected tensors: {missing}, {unexpected}")
    model.tie_weights()
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=name)


@torch.inference_mode()
def greedy_steps(
    model: Any, prompts: list[list[int]], count: int = NUM_TOKENS
) -> list[list[dict[str, Any]]]:
    """For each prompt `count` greedy tokens, each with the log probabilities of the likeliest ones.

    One batch, padded on the left and masked there.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    steps: list[list[dict[str, Any]]] = [[] for _ in prompts]
    cache = None
    for _ in range(count):
        out = model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        top = torch.log_softmax(out.logits[:, -1].double(), dim=-1).topk(NUM_TOP)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        for taken, (likeliest, logprobs) in zip(steps, rows, strict=True):
            rounded = [round(value, 5) for value in logprobs]
            taken.append({"ids": likeliest, "logprobs": rounded})
        ids = top.indices[:, :1]
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = positions[:, -1:] + 1
    return steps


@torch.inference_mode()
def nll_per_token(model: Any, ids: list[int]) -> float:
    """Mean negative log likelihood of every token but the first."""
    logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])))


def make(model: Any, tokenizer: Any) -> dict[str, Any]:
    rendered = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for chat in CHATS
    ]
    prompts = PROMPTS + rendered
    prompt_ids = [tokenizer(text, add_special_tokens=False).input_ids for text in prompts]
    answers = zip(prompts, prompt_ids, greedy_steps(model, prompt_ids), strict=True)
    alice = tokenizer((DATA / "alice.txt").read_text(), add_special_tokens=False).input_ids
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "model_sha256": DEFAULT_MODEL.sha256,
        "chats": [{"messages": c, "text": t} for c, t in zip(CHATS, rendered, strict=True)],
        "texts": [
            {"text": text, "ids": tokenizer(text, add_special_tokens=False).input_ids}
            for text in TEXTS
        ],
        "prompts": [{"text": t, "ids": ids, "steps": steps} for t, ids, steps in answers],
        "alice": {"num_tokens": len(alice), "nll_per_token": nll_per_token(model, alice)},
    }


def compact(reference: dict[str, Any]) -> str:
    """JSON with one prompt, chat or text a line."""
    lines = []
    for name, value in reference.items():
        if isinstance(value, list):
            rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in value)
            lines.append(f" {json.dumps(name)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    (DATA / "reference.json").write_text(compact(make(*load_reference(ensure_default_model()))))
