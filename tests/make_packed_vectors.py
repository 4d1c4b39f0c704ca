#!/usr/bin/env python3
"""Makes tests/vectors/scaled/<case>/ of what compressed-tensors packs: integers of 4 bits with a scale for each group of a row, as Kimi-K2 Thinking and
Kimi-K2.5 are published, of 8 bits with one for each row, 8-bit floats with one for each row, and floats of 4 bits: NVFP4, also as ModelOpt's files have it
(which the package converts), and MXFP4. Quantized and decoded by that package. Run from the
repository's root, where torch and compressed-tensors (0.20.1) are installed:

    python3 tests/make_packed_vectors.py

Files as make_fp8_vectors.py writes them.
"""
import json, os, re
import torch
from safetensors.torch import save_file
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize

OUT = os.path.join("tests", "vectors", "scaled")
torch.manual_seed(6)


def make(case, config, shapes, quantized, format, weights, prefix="", beside=None, at=None):
    args = QuantizationArgs(**weights)
    scheme, compressor = QuantizationScheme(targets=["Linear"], weights=args, format=format), BaseCompressor.load_from_registry(format)
    tensors, expect = dict(beside or {}), {}
    for name, shape in shapes.items():
        w = torch.randn(shape) * (0.7 / shape[-1] ** 0.5 if len(shape) == 2 else 0.1) + (len(shape) == 1)
        if not re.search(quantized, name):
            tensors[prefix + name] = w.bfloat16()
            continue
        groups = w.view(shape[0], -1, args.group_size if args.group_size else shape[1])
        scale = (groups.abs().amax(2) / (448 if args.type == "float" else 2 ** (args.num_bits - 1) - 0.5)).bfloat16()
        packed = compressor.compress({"weight": w.bfloat16(), "weight_scale": scale}, scheme)
        # Of an fp32 scale the product is not rounded to bf16.
        expect[name] = compressor.decompress(packed | {"weight_scale": scale.float()}, scheme)["weight"]
        assert expect[name].dtype == torch.float32 and expect[name].shape == w.shape and (expect[name] - w).abs().max() < w.abs().max() / 5
        tensors |= {prefix + name.removesuffix("weight") + key: t for key, t in packed.items()}
    folder = os.path.join(OUT, case)
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    save_file(expect, os.path.join(folder, "expect.safetensors"))
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"],
             "weights": {"actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax", "observer_kwargs": {}} | weights}
    (config[at] if at else config)["quantization_config"] = {
        "config_groups": {"group_0": group}, "format": format, "ignore": ["lm_head"], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed"}
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f, indent=2)
        f.write("\n")


def norms(at, width):
    return {at + "input_layernorm.weight": (width,), at + "post_attention_layernorm.weight": (width,)}


def mlp(at, width, inner):
    return {at + "gate_proj.weight": (inner, width), at + "up_proj.weight": (inner, width), at + "down_proj.weight": (width, inner)}


def llama():
    shapes = {"model.embed_tokens.weight": (41, 24), "model.norm.weight": (24,), "lm_head.weight": (41, 24)}
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= norms(at, 24) | mlp(at + "mlp.", 24, 44)
        shapes |= {f"{at}self_attn.{k}_proj.weight": (rows, 24) for k, rows in (("q", 24), ("k", 8), ("v", 8), ("o", 24))}
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=1, vocab_size=41,
                  max_position_embeddings=64, dtype="bfloat16", intermediate_size=44, num_hidden_layers=2, hidden_act="silu", rms_norm_eps=1e-5,
                  rope_theta=10000.0, tie_word_embeddings=False)
    return config, shapes


def kimi():
    shapes = {"model.embed_tokens.weight": (41, 32), "model.norm.weight": (32,), "lm_head.weight": (41, 32)}
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= norms(at, 32) | (mlp(at + "mlp.", 32, 24) if i == 0 else mlp(at + "mlp.shared_experts.", 32, 16))
        shapes |= {at + "self_attn.q_a_proj.weight": (12, 32), at + "self_attn.q_a_layernorm.weight": (12,), at + "self_attn.q_b_proj.weight": (40, 12),
                   at + "self_attn.kv_a_proj_with_mqa.weight": (14, 32), at + "self_attn.kv_a_layernorm.weight": (10,),
                   at + "self_attn.kv_b_proj.weight": (48, 10), at + "self_attn.o_proj.weight": (32, 24)}
        for e in range(4 if i == 1 else 0):
            shapes |= mlp(f"{at}mlp.experts.{e}.", 32, 16)
    shapes |= {"model.layers.1.mlp.gate.weight": (4, 32), "model.layers.1.mlp.gate.e_score_correction_bias": (4,)}
    text = dict(architectures=["DeepseekV3ForCausalLM"], model_type="kimi_k2", vocab_size=41, hidden_size=32, intermediate_size=24, moe_intermediate_size=16,
                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, routed_scaling_factor=2.827,
                kv_lora_rank=10, q_lora_rank=12, qk_rope_head_dim=4, v_head_dim=6, qk_nope_head_dim=6, n_group=1, topk_group=1, num_experts_per_tok=2,
                first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=True, hidden_act="silu", max_position_embeddings=64, rms_norm_eps=1e-5,
                rope_theta=50000.0, rope_scaling=None, attention_bias=False, tie_word_embeddings=False, scoring_func="sigmoid", topk_method="noaux_tc",
                dtype="bfloat16")
    return dict(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", text_config=text, vision_config={}, tie_word_embeddings=False), shapes


def wide_llama():
    shapes = {"model.embed_tokens.weight": (41, 64), "model.norm.weight": (64,)} | norms("model.layers.0.", 64) | mlp("model.layers.0.mlp.", 64, 32)
    shapes |= {f"model.layers.0.self_attn.{k}_proj.weight": (rows, 64) for k, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))}
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, vocab_size=41,
                  max_position_embeddings=64, dtype="bfloat16", intermediate_size=32, num_hidden_layers=1, hidden_act="silu", rms_norm_eps=1e-5,
                  rope_theta=10000.0, tie_word_embeddings=True)
    return config, shapes


def floats4(case, modelopt=False):
    """The scales of a group are random, and some of its numbers beyond them; NVFP4's are divided by a number that is no power of two."""
    config, shapes = wide_llama()
    nv = case != "llama_mxfp4"
    weights = dict(num_bits=4, type="float", symmetric=True, strategy="tensor_group" if nv else "group", group_size=16 if nv else 32,
                   scale_dtype="torch.float8_e4m3fn" if nv else "torch.uint8")
    format = "nvfp4-pack-quantized" if nv else "mxfp4-pack-quantized"
    args = QuantizationArgs(**weights)
    scheme, compressor = QuantizationScheme(targets=["Linear"], weights=args, format=format), BaseCompressor.load_from_registry(format)
    tensors, expect = {}, {}
    for name, shape in shapes.items():
        w = torch.randn(shape) * (0.7 / shape[-1] ** 0.5 if len(shape) == 2 else 0.1) + (len(shape) == 1)
        at = name.removesuffix("weight")
        if "_proj." not in name:
            tensors[name] = w.bfloat16()
            continue
        codes = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8)
        groups = (shape[0], shape[1] // args.group_size)
        if nv:
            scale = (torch.rand(groups) * 440 + 1e-3).to(torch.float8_e4m3fn)
            own = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": torch.rand(1) * 4000 + 4000}
        else:
            own = {"weight_packed": codes, "weight_scale": torch.randint(118, 124, groups, dtype=torch.uint8)}
        if modelopt:
            there = {at + "weight": codes, at + "weight_scale": scale, at + "weight_scale_2": 1 / own["weight_global_scale"][0], at + "input_scale": torch.ones([])}
            tensors |= there
            own = {key.removeprefix(at): t for key, t in ModelOptNvfp4Converter(targets=[r"re:.*_proj$"]).process(dict(there)).items()}
            own["weight_global_scale"] = own["weight_global_scale"].view(1)  # without dimensions torch would divide in bf16
        else:
            tensors |= {at + key: t for key, t in own.items()}
        unpacked = unpack_fp4_from_uint8(codes, *shape, dtype=torch.float32)
        scale = compressor._decompress_scale(own["weight_scale"], torch.float32)
        expect[name] = dequantize(x_q=unpacked, scale=scale, args=args, global_scale=own.get("weight_global_scale"), dtype=torch.float32)
        known = compressor.decompress({k: own[k] for k in own if k != "input_global_scale"}, scheme)["weight"]
        assert known.dtype == torch.bfloat16 and torch.equal(known, expect[name].bfloat16())  # as it is loaded
    folder = os.path.join(OUT, case)
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    save_file(expect, os.path.join(folder, "expect.safetensors"))
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": {"dynamic": False, "observer": "minmax"} | weights}
    if modelopt:
        config["quantization_config"] = {
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}},
            "ignore": ["lm_head"], "quant_algo": "NVFP4", "producer": {"name": "modelopt"}, "quant_method": "modelopt"}
    else:
        config["quantization_config"] = {"config_groups": {"group_0": group | {"format": format}}, "format": format, "ignore": ["lm_head"], "kv_cache_scheme": None,
                                         "quant_method": "compressed-tensors", "quantization_status": "compressed"}
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f, indent=2)
        f.write("\n")


config, shapes = kimi()
make("kimi_k25", config, shapes, r"mlp\.experts\.", "pack-quantized", dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=16),
     prefix="language_model.", beside={"vision_tower.encoder.final_layernorm.weight": torch.ones(4), "mm_projector.pre_norm.weight": torch.ones(4)}, at="text_config")
make("llama_int8", *llama(), r"_proj\.", "pack-quantized", dict(num_bits=8, type="int", symmetric=True, strategy="channel", group_size=None))
make("llama_float", *llama(), r"_proj\.", "float-quantized", dict(num_bits=8, type="float", symmetric=True, strategy="channel", group_size=None))
floats4("llama_nvfp4")
floats4("llama_modelopt", modelopt=True)
floats4("llama_mxfp4")
