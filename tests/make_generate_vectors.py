#!/usr/bin/env python3
"""Makes tests/vectors/generate.txt: what transformers draws greedily, with its own cache, from each model in vectors/families.

A line is: case, prompt ids, a bar, drawn ids. Of the prompts whose every choice is more than 1e-3 ahead of the second best, so
that rounding in another order turns none, it has the one whose text has most different tokens. With names of cases: those lines
are added to what is there.
"""
import os, sys
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from make_family_vectors import choices_by_order

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vectors")
torch.set_num_threads(1)
torch.manual_seed(5)
lines, least = [], float("inf")
for case in sys.argv[1:] or sorted(os.listdir(os.path.join(HERE, "families"))):
    model = (AutoModelForImageTextToText if case.endswith("_images") or case == "mistral4" else AutoModelForCausalLM).from_pretrained(os.path.join(HERE, "families", case), dtype=torch.float32, attn_implementation="eager",
                                                 experts_implementation="eager").eval()
    model = model.language_model if model.config.model_type == "llama4" else model  # whose whole takes no text without images
    config = model.config.get_text_config()
    positions = getattr(config, "n_positions", None) or config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    # Where rope changes at a length, the class draws what comes before by the one and goes on by the other: prompts are longer then.
    beyond = rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else 0
    # Where tokens come one by one Nemotron-H's class does not make steps as long as time_step_min: there all come again.
    cached = getattr(config, "time_step_min", 0) < 0.1
    for length in (1, 6, 11) if beyond in (0, positions) else (beyond + 1, beyond + 6, beyond + 11):
        margin, count = torch.zeros(1), min(40, positions - length)
        while margin.max() < 1e-3:
            prompt = torch.randint(0, config.vocab_size, (40, length))
            with torch.no_grad(), choices_by_order(model):
                out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count,
                                     min_new_tokens=count, eos_token_id=None, pad_token_id=0, use_cache=cached)
                top = model(out, use_cache=False).logits[:, length - 1:-1].topk(2).values
            margin = (top[..., 0] - top[..., 1]).min(dim=1).values
        row = max((i for i in range(len(out)) if margin[i] >= 1e-3), key=lambda i: len(set(out[i, length:].tolist())))
        least = min(least, margin[row].item())
        lines.append(f"{case} {' '.join(map(str, prompt[row].tolist()))} | {' '.join(map(str, out[row, length:].tolist()))}\n")
open(os.path.join(HERE, "generate.txt"), "a" if sys.argv[1:] else "w").writelines(lines)
print(f"{len(lines)} lines, least margin {least:.2g}")
