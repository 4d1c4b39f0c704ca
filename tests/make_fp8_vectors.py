#!/usr/bin/env python3
"""Makes tests/vectors/scaled/<case>/: folders whose matrices are 8-bit floats with a scale for each block, as DeepSeek-V3 and Qwen3's are
published, or with one for all of it, as Ministral 3's are; quantized and decoded by torch. One folder is in the form of DeepSeek-V4: scales are powers of two in
8 bits, and experts floats of 4 bits, decoded by transformers (5.24). Run from the repository's root:

    python3 tests/make_fp8_vectors.py

config.json and model.safetensors are what is read; expect.safetensors has every quantized matrix decoded in fp32 by its name and,
in "e4m3" (256), the number of each code. No size is a multiple of its block.
"""
import json, os
import torch
from safetensors.torch import save_file

OUT = os.path.join("tests", "vectors", "scaled")
torch.manual_seed(5)
FP8 = torch.float8_e4m3fn


def spread(scale, block, shape):
    return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:shape[0], :shape[1]]


# Scales in bf16 are powers of two, as scale_fmt ue8m0 says.
def quantize(w, block, dtype):
    if block is None:
        scale = (w.abs().max() / 448).to(dtype)
        return (w / scale.float()).clamp(-448, 448).to(FP8), scale
    rows, cols = (-(-n // b) for n, b in zip(w.shape, block))
    scale = torch.empty(rows, cols)
    for r in range(rows):
        for c in range(cols):
            part = w[r * block[0]:(r + 1) * block[0], c * block[1]:(c + 1) * block[1]]
            scale[r, c] = part.abs().max() / 448
    scale = scale if dtype == torch.float32 else scale.log2().ceil().exp2().to(dtype)
    return (w / spread(scale.float(), block, w.shape)).clamp(-448, 448).to(FP8), scale


def make(case, config, quantization, block, scale_dtype, layer, heads_dim):
    width, vocab, q, kv = config["hidden_size"], config["vocab_size"], *heads_dim
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, width)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm.weight": (width,), at + "post_attention_layernorm.weight": (width,),
                   at + "self_attn.q_proj.weight": (q, width), at + "self_attn.k_proj.weight": (kv, width),
                   at + "self_attn.v_proj.weight": (kv, width), at + "self_attn.o_proj.weight": (width, q)}
        shapes |= {at + name: shape for name, shape in layer.items()}
    tensors, expect = {}, {"e4m3": torch.arange(256, dtype=torch.uint8).view(FP8).float()}
    for name, shape in shapes.items():
        w = torch.randn(shape) * (0.7 / shape[-1] ** 0.5 if len(shape) == 2 else 0.1) + (len(shape) == 1)
        if "proj" not in name:
            tensors[name] = w.bfloat16()
            continue
        tensors[name], tensors[name + "_scale_inv"] = codes, scale = quantize(w, block, scale_dtype)
        if block is None:
            tensors[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5, dtype=scale_dtype)
        expect[name] = codes.float() * (scale.float() if block is None else spread(scale.float(), block, shape))
    folder = os.path.join(OUT, case)
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    save_file(expect, os.path.join(folder, "expect.safetensors"))
    quantization = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": block} | quantization
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config | {"quantization_config": quantization}, f, indent=2)
        f.write("\n")


common = dict(hidden_size=24, num_attention_heads=3, num_key_value_heads=1, vocab_size=41, max_position_embeddings=64, dtype="bfloat16")
make("llama", common | dict(architectures=["LlamaForCausalLM"], model_type="llama", intermediate_size=44, num_hidden_layers=2,
                            hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False),
     {"modules_to_not_convert": ["lm_head"]}, [16, 10], torch.float32,
     {"mlp.gate_proj.weight": (44, 24), "mlp.up_proj.weight": (44, 24), "mlp.down_proj.weight": (24, 44)}, (24, 8))
experts = {f"mlp.experts.{e}.{kind}_proj.weight": (24, 136) if kind == "down" else (136, 24) for e in range(3) for kind in ("gate", "up", "down")}
make("qwen3_moe", common | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=8, moe_intermediate_size=136,
                                intermediate_size=136, num_hidden_layers=1, num_experts=3, num_experts_per_tok=2, norm_topk_prob=True,
                                hidden_act="silu", rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True),
     {"scale_fmt": "ue8m0"}, [128, 128], torch.bfloat16,
     experts | {"mlp.gate.weight": (3, 24), "self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}, (24, 8))
make("ministral3", common | dict(architectures=["Ministral3ForCausalLM"], model_type="ministral3", head_dim=8, intermediate_size=44, num_hidden_layers=2,
                                 hidden_act="silu", rms_norm_eps=1e-5, tie_word_embeddings=True,
                                 rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1)),
     {"activation_scheme": "static", "dequantize": False, "modules_to_not_convert": ["lm_head"]}, None, torch.bfloat16,
     {"mlp.gate_proj.weight": (44, 24), "mlp.up_proj.weight": (44, 24), "mlp.down_proj.weight": (24, 44)}, (24, 8))


# DeepSeek-V4's form, of another family: both names of scales, and any codes.
def beside_fp4():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    config = common | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=32, num_attention_heads=4, head_dim=8, moe_intermediate_size=64,
                           intermediate_size=64, num_hidden_layers=1, num_experts=2, num_experts_per_tok=2, norm_topk_prob=True, hidden_act="silu",
                           rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True)
    at, tensors, expect = "model.layers.0.", {}, {}
    for name, shape in {"model.embed_tokens.weight": (41, 32), "model.norm.weight": (32,), at + "input_layernorm.weight": (32,), at + "mlp.gate.weight": (2, 32),
                        at + "post_attention_layernorm.weight": (32,), at + "self_attn.q_norm.weight": (8,), at + "self_attn.k_norm.weight": (8,)}.items():
        tensors[name] = (torch.randn(shape) * 0.1 + (len(shape) == 1)).bfloat16()
    shapes = {at + f"self_attn.{k}_proj.weight": (rows, 32) for k, rows in (("q", 32), ("k", 8), ("v", 8), ("o", 32))}
    shapes |= {at + f"mlp.experts.{e}.{k}_proj.weight": (32, 64) if k == "down" else (64, 32) for e in range(2) for k in ("gate", "up", "down")}
    for name, (rows, cols) in shapes.items():
        if "experts" in name:
            codes = torch.randint(-128, 128, (rows, cols // 2), dtype=torch.int8)
            scale = torch.randint(119, 124, (rows, cols // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        else:
            codes, scale = (torch.randn(rows, cols) * 100).to(FP8), torch.randint(112, 117, (-(-rows // 8), cols // 16), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        tensors[name] = codes
        tensors[name.removesuffix(".weight") + ".scale" if "experts.1" in name or "q_proj" in name else name + "_scale_inv"] = scale
        expect[name] = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    folder = os.path.join(OUT, "qwen3_fp4")
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    save_file(expect, os.path.join(folder, "expect.safetensors"))
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config | {"quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4",
                                                    "weight_block_size": [8, 16]}}, f, indent=2)
        f.write("\n")


beside_fp4()


# DeepSeek-V4 itself, with its own names of tensors.
def deepseek_v4():
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    import tempfile
    with open(os.path.join("tests", "vectors", "families", "deepseek_v4_all", "config.json")) as f:
        config = json.load(f)
    config |= dict(hidden_size=32, moe_intermediate_size=32, num_hidden_layers=1, n_routed_experts=2, num_experts_per_tok=2, num_hash_layers=0, num_attention_heads=2,
                   head_dim=8, q_lora_rank=8, o_lora_rank=4, o_groups=2, qk_rope_head_dim=4, compress_ratios=[0, 0], dtype="bfloat16", num_nextn_predict_layers=0)
    config.pop("transformers_version")
    with tempfile.TemporaryDirectory() as at:
        with open(os.path.join(at, "config.json"), "w") as f:
            json.dump(config, f)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(at)).bfloat16().save_pretrained(at)
        from safetensors.torch import load_file
        saved = load_file(os.path.join(at, "model.safetensors"))
        with open(os.path.join(at, "config.json")) as f:
            config = json.load(f)
    tensors, expect = {}, {}
    for name, t in saved.items():
        here = name.replace(".ffn.", ".mlp.").replace(".attn.wo_b.", ".self_attn.o_b_proj.")
        if ".experts." in name:
            codes = torch.randint(-128, 128, (t.shape[0], t.shape[1] // 2), dtype=torch.int8)
            scale = torch.randint(119, 124, (t.shape[0], t.shape[1] // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        elif ".wo_b." in name:
            codes, scale = (torch.randn(t.shape) * 100).to(FP8), torch.randint(112, 117, (1, 1), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        else:
            tensors[name] = t.contiguous()
            continue
        name = name.removeprefix("model.")  # as published
        tensors[name], tensors[name.removesuffix(".weight") + ".scale"] = codes, scale
        expect[here] = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    folder = os.path.join(OUT, "deepseek_v4")
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    save_file(expect, os.path.join(folder, "expect.safetensors"))
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config | {"expert_dtype": "fp4", "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
                                                                           "weight_block_size": [128, 128]}}, f, indent=2)
        f.write("\n")


deepseek_v4()
