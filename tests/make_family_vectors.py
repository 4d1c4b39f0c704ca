#!/usr/bin/env python3
"""Makes tests/vectors/families/<case>/: tiny models of every family by transformers in fp32, with files as it writes them.
With names of cases: only those. With --random SEED COUNT FOLDER: COUNT models of shapes drawn by SEED, families in turn, in FOLDER (tests/test_random_families.sh).

config.json and the weights (fp32, bf16 or fp16, one file or shards) are save_pretrained's; expect.safetensors has tokens and
targets (B, T) as fp32, logits (B, T, vocab), the mean loss, and the gradient of every parameter by its Spillway name. Two
cases are rewritten by hand into what older releases wrote: rope_theta and rope_scaling, and GPT-2 without its prefix but with
its mask buffers. Weights are drawn large enough that every part of the model shows in the logits.
"""
import contextlib, copy, json, math, os, random, shutil, sys
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (AfmoeConfig, AutoModelForCausalLM, AutoModelForImageTextToText, BambaConfig, Cohere2Config, CohereConfig, DeepseekV2Config, DeepseekV32Config, DeepseekV3Config, DeepseekV4Config, Dots1Config, Ernie4_5Config, Ernie4_5_MoeConfig, Exaone4Config, ExaoneMoeConfig, FalconH1Config, Gemma2Config, GemmaConfig, Gemma3Config, Gemma3TextConfig, Gemma4Config, Gemma4TextConfig, Gemma4UnifiedConfig, Glm4Config, Glm4MoeConfig, Glm4MoeLiteConfig, GlmConfig, GlmMoeDsaConfig, GPT2Config, GPTNeoXConfig, GptOssConfig, GraniteConfig, GraniteMoeHybridConfig, HunYuanDenseV1Config, HunYuanMoEV1Config, HYV3Config, Kimi_K25Config, KimiLinearConfig, Lfm2Config, Lfm2MoeConfig, Llama4Config, Llama4TextConfig, Llama4VisionConfig, LlamaConfig, Ministral3Config, MistralConfig, Mistral3Config, Mistral4Config, MiMoV2FlashConfig, MiniMaxM2Config, MixtralConfig, NemotronHConfig, OlmoHybridConfig, Olmo2Config, Olmo3Config, OlmoeConfig, OPTConfig,
                          Phi3Config, PixtralVisionConfig, Qwen2_5_VLConfig, Qwen2Config, Qwen2MoeConfig, Qwen2VLConfig, Qwen3_5Config, Qwen3_5MoeConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig, Qwen3VLConfig, Qwen3VLMoeConfig, SeedOssConfig, SiglipVisionConfig,
                          SmolLM3Config, SolarOpenConfig, StableLmConfig, Starcoder2Config)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vectors", "families")
B, T = 2, 18
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


def draw(model, dtype):
    for name, p in model.named_parameters():
        norm = "norm" in name or ".ln_" in name
        kind = model.config.model_type
        from_one = kind.startswith(("gemma", "qwen3_5", "qwen3_next")) and not kind.startswith("gemma4") and "linear_attn" not in name
        if "conv1d" in name:
            x = torch.randn(p.shape) * 0.7
        elif name.endswith(("A_log", "dt_bias")):  # so small that states outlive some rows
            x = torch.randn(p.shape) - (1.0 if name.endswith("A_log") else 0.0)
        elif p.ndim == 3 and kind == "deepseek_v4" and "gate_up" in name:  # so large that gates are cut off
            x = torch.randn(p.shape) * 5.0 / math.sqrt(p.shape[2])
        elif p.ndim == 3:  # of experts: (experts, out, in), of gpt-oss (experts, in, out) and so large that gates are cut off
            oss = model.config.model_type == "gpt_oss"
            x = torch.randn(p.shape) * ((4.0 if "gate_up" in name else 0.2) / math.sqrt(p.shape[1]) if oss else 0.7 / math.sqrt(p.shape[2]))
        elif "sinks" in name:
            x = torch.randn(p.shape)
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            x = torch.randn(p.shape) * 0.05
        elif p.ndim == 2:
            x = torch.randn(p.shape) * (0.7 / math.sqrt(p.shape[0] if "c_" in name else p.shape[1]))
            x = torch.randn(p.shape) * 0.4 if "embed" in name or "wte" in name or "wpe" in name else x
        else:
            x = 0.1 * torch.randn(p.shape) + (1.0 if norm and name.endswith("weight") and not from_one or name.endswith("scale") else 0.0)
        p.data = x.to(dtype).float()
    for name, p in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            p.copy_((0.05 * torch.randn(p.shape)).to(dtype))
        elif name.endswith("tid2eid"):
            p.copy_(torch.stack([torch.randperm(model.config.n_routed_experts)[:p.shape[1]] for _ in range(p.shape[0])]))
        elif name.endswith("layer_scalar"):
            p.copy_((1 + 0.2 * torch.randn(p.shape)).to(dtype))


# Channels of queries, keys and values.
def apart(config):
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return [keys, keys, config.linear_num_value_heads * config.linear_value_head_dim]


# As OLMo Hybrid's folder has it: transformers saves taps in three equal parts, whatever they are of, and one norm under one name in both kinds of layers.
def hybrid_keys(folder, config):
    path = os.path.join(folder, "model.safetensors")
    t = load_file(path)
    for name in [n for n in t if n.endswith("q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{kind}_conv1d") for kind in "qkv"]
        t |= {n: x.contiguous() for n, x in zip(names, torch.cat([t[n] for n in names]).split(apart(config)))}
    for i in (i for i, kind in enumerate(config.layer_types) if kind == "full_attention"):
        t[f"model.layers.{i}.post_attention_layernorm.weight"] = t.pop(f"model.layers.{i}.feedforward_layer_norm.weight")
    save_file(t, path, metadata={"format": "pt"})
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    json.dump(c | {"rope_parameters": None, "rope_theta": None}, open(path, "w"), indent=2)


# Of a layer of Kimi Linear's without experts, whose MLP has its own name in files.
def dense_kimi(name, config):
    return config.model_type == "kimi_linear" and any(f".mlp.{kind}_proj." in name for kind in ("gate", "up", "down"))


# As Kimi Linear's folder has it: layers by their numbers, what its class does anyway, and MLPs by one name, experts by another; transformers saves all by the latter.
def kimi_linear_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    kinds, dense = c.pop("layer_types"), c.pop("mlp_layer_types").count("dense")
    numbers = lambda kind: [i + 1 for i, k in enumerate(kinds) if k == kind]
    c |= {"linear_attn_config": {"full_attn_layers": numbers("full_attention"), "kda_layers": numbers("linear_attention"), "head_dim": c.pop("linear_head_dim"),
                                 "num_heads": c.pop("linear_num_heads"), "short_conv_kernel_size": c.pop("linear_conv_kernel_dim")},
          "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"}, "first_k_dense_replace": dense, "head_dim": c["hidden_size"] // c["num_attention_heads"],
          "mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "num_nextn_predict_layers": 0, "rope_scaling": None, "rope_theta": 10000.0, "use_grouped_topk": True}
    del c["output_router_logits"], c["qk_head_dim"], c["attention_bias"]
    json.dump(c, open(path, "w"), indent=2)
    path = os.path.join(folder, "model.safetensors")
    t = {n.replace(".block_sparse_moe.", ".mlp.") if dense_kimi(n.replace(".block_sparse_moe.", ".mlp."), KimiLinearConfig()) else n: w for n, w in load_file(path).items()}
    save_file(t, path, metadata={"format": "pt"})


# The gradient of each expert's weights by the name that they have in files.
def gradients(model, config):
    for name, p in model.named_parameters():
        grad, mixtral = p.grad, config.model_type in ("mixtral", "minimax_m2", "deepseek_v4", "lfm2_moe", "kimi_linear")
        if grad is None and config.model_type == "deepseek_v4" and ".indexer." not in name:  # of keys that no sequence is long enough for
            grad = torch.zeros_like(p)
        if grad is None:  # of what reads images
            continue
        name = name.replace("lm_head", "embed_out") if config.model_type == "gpt_neox" else name  # as its files have it
        name = name.replace(".sinks", ".attention_sink_bias") if config.model_type == "mimo_v2_flash" else name
        name = name.removeprefix("transformer.").replace("language_model.", "").replace(".mlp.", ".block_sparse_moe." if mixtral and config.model_type != "deepseek_v4" and not dense_kimi(name, config) else ".mlp.")
        if config.model_type == "nemotron_h":
            name = name.replace("model.", "backbone.")
        if config.model_type == "hy_v3":
            name = name.replace(".mlp.gate.", ".mlp.router.gate.").replace(".shared_experts.", ".shared_mlp.")
        if config.get_text_config().model_type in ("gpt_oss", "gemma4_text", "llama4_text", "mistral4") and ".experts." in name:
            for e in range(grad.shape[0]):
                yield f"{name}.{e}", grad[e]
            continue
        if config.model_type == "granitemoehybrid":
            name = name.replace(".router.", ".router.layer.").replace("experts.gate_up_proj", "input_linear.weight").replace("experts.down_proj", "output_linear.weight")
            if p.ndim == 3 and "conv1d" not in name:
                for e in range(grad.shape[0]):
                    yield f"{name}.{e}", grad[e]
                continue
        if config.model_type == "olmo_hybrid" and name.startswith("model.layers.") and config.layer_types[int(name.split(".")[2])] == "linear_attention":
            name = name.replace(".input_layernorm.", ".attention_layer_norm.").replace(".post_attention_layernorm.", ".feedforward_layer_norm.")
        if config.model_type == "olmo_hybrid" and "conv1d" in name:
            yield from zip((name.replace("conv1d", f"{kind}_conv1d") for kind in "qkv"), grad.split(apart(config)))
            continue
        if config.model_type == "kimi_linear":
            name = name.replace(".forget_gate.", ".")
            if "conv1d" in name:
                yield from zip((name.replace("conv1d", f"{kind}_conv1d") for kind in "qkv"), grad.chunk(3))
                continue
        if p.ndim < 3 or "conv1d" in name or ".conv." in name or name.endswith("A_log"):
            yield name, grad
            continue
        kinds = [("w2", "down_proj")] if name.endswith("down_proj") else [("w1", "gate_proj"), ("w3", "up_proj")]
        kinds = kinds[-1:] if name.endswith("up_proj") and not name.endswith("gate_up_proj") else kinds
        for kind, part in zip(kinds, grad.chunk(len(kinds), dim=1)):
            for e in range(part.shape[0]):
                yield f"{name.rsplit('.', 1)[0]}.{e}.{kind[0] if mixtral else kind[1]}.weight", part[e]


# Parameters in double, and with them all that is computed but rope's tables, which are fp32 in every implementation: what the
# classes raise to float32 before norms and softmax stays what it is.
@contextlib.contextmanager
def in_double(model):
    single, to_single = torch.float32, torch.Tensor.float

    def floats(kind):
        torch.float32 = torch.float = kind
    for p in model.parameters():
        p.data = p.data.double()
    tables = [m for m in model.modules() if type(m).__name__.endswith("TextRotaryEmbedding") or type(m).__name__ == "DeepseekV4RotaryEmbedding"]  # some ask for torch.float there
    hooks = [m.register_forward_pre_hook(lambda *_: floats(single)) for m in tables] + [m.register_forward_hook(lambda *_: floats(torch.float64)) for m in tables]
    floats(torch.float64)
    torch.Tensor.float = lambda x: x if x.dtype == torch.float64 else to_single(x)
    try:
        yield
    finally:
        floats(single)
        torch.Tensor.float = to_single
        for hook in hooks:
            hook.remove()


def results(model, config, tokens, targets, balance):
    B, T = tokens.shape
    model = model.language_model if config.model_type == "llama4" else model  # whose whole takes no text without images
    # Without a cache: there is none for layers of linear attention alone.
    result = model(tokens, output_router_logits=True) if balance else model(tokens, use_cache=False)
    logits = result.logits
    loss = F.cross_entropy(logits.view(B * T, -1), targets.view(-1))
    k = getattr(config, "num_experts_per_tok", 1)
    (loss + (balance / k * load_balancing_loss_func(result.router_logits, config.num_local_experts, k) if balance else 0)).backward()
    expect = {"tokens": tokens, "targets": targets, "logits": logits.detach(), "loss": loss.detach().view(1)}
    return expect | {"grad." + name: grad for name, grad in gradients(model, config)}


class CloseChoice(Exception):
    pass


# What indexers choose, of equal scores the first, as Spillway does and torch leaves open. `margin` gets the least that a score not chosen is
# below one that is, by the row's greatest: where that is in rounding's reach nothing is to be compared.
@contextlib.contextmanager
def choices_by_order(model):
    least, plain = [math.inf], torch.Tensor.topk

    def topk(scores, k, dim):
        values, order = scores.sort(dim=dim, descending=True, stable=True)
        if k < scores.shape[-1]:
            apart, seen = values[..., k - 1] - values[..., k], values[..., k] > -1e30
            apart = apart / values.masked_fill(values < -1e30, 0).abs().amax(dim=-1)
            least.extend(x.item() for x in apart[seen & (apart > 0)])
        return torch.return_types.topk((values[..., :k], order[..., :k]))

    def within(function):
        torch.Tensor.topk = function
    indexers = [m for m in model.modules() if type(m).__name__.endswith("Indexer")]
    hooks = [m.register_forward_pre_hook(lambda *_: within(topk)) for m in indexers] + [m.register_forward_hook(lambda *_: within(plain)) for m in indexers]
    try:
        yield lambda: min(least)
    finally:
        for hook in hooks:
            hook.remove()


# How far gradients in fp32 are from those in double, at most, by test_families.c's measure.
def rounding(single, double):
    names = [name for name in double if name.startswith("grad.")]
    norm = math.sqrt(sum(double[name].square().sum().item() for name in names))
    return max((single[name] - double[name]).norm().item() / (double[name].norm().item() + 0.01 * norm) for name in names)


# balance: of a loss that spreads tokens over experts; with one layer transformers' is ours with this weight over the choices.
# double: what is expected is computed so, and "rounding" says what fp32 does to it; wide: at worst of attention in two ways and of weights off by an ulp.
def make(case, config, dtype, shard=None, rewrite=None, change=None, out=OUT, seed=11, B=B, T=T, balance=0, double=False, wide=False):
    if len(sys.argv) > 1 and sys.argv[1] != "--random" and case not in sys.argv[1:]:
        return
    torch.manual_seed(seed)
    folder = os.path.join(out, case)
    shutil.rmtree(folder, ignore_errors=True)
    kind = AutoModelForImageTextToText if hasattr(config, "text_config") or config.model_type == "mistral4" else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager", experts_implementation="eager").float().eval()
    draw(model, dtype)
    rewrite = change(model) if change else rewrite
    # A copy: to() rounds buffers too, and with them the frequencies of the rotary positions.
    copy.deepcopy(model).to(dtype).save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    os.remove(os.path.join(folder, "generation_config.json"))
    vocab = config.get_text_config().vocab_size
    tokens = torch.randint(0, vocab, (B, T))
    targets = torch.randint(0, vocab, (B, T))
    with choices_by_order(model) as margin:
        expect = results(model, config, tokens, targets, balance)
    if margin() < 1e-4:
        raise CloseChoice(f"{case}: an indexer chooses by {margin():.1e} of a score")
    if double:
        singles, exact = [expect], {name: p.data.clone() for name, p in model.named_parameters()}
        for way, ulps in (("sdpa", 0), ("sdpa", 1), ("eager", 1)) if wide else ():
            model.zero_grad()
            model.set_attn_implementation("eager" if config.model_type == "deepseek_v4" else way)  # which has one way
            for name, p in model.named_parameters():
                p.data = exact[name] * (1 + ulps * 2.0**-23 * torch.randint(-1, 2, p.shape))
            with choices_by_order(model):
                singles.append(results(model, config, tokens, targets, balance))
            for name, p in model.named_parameters():
                p.data = exact[name].clone()
        model.zero_grad()
        model.set_attn_implementation("eager")
        with in_double(model), choices_by_order(model):
            expect = results(model, config, tokens, targets, balance)
        assert all(expect[name].dtype == torch.float64 for name in expect if name not in ("tokens", "targets"))
        expect["rounding"] = torch.tensor([max(rounding(single, expect) for single in singles)])
    loss, logits = expect["loss"], expect["logits"]
    save_file({k: v.float().contiguous() for k, v in expect.items()}, os.path.join(folder, "expect.safetensors"))
    if rewrite:
        rewrite(folder)
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    print(f"{case:16} loss {loss.item():.4f}  logits to {logits.abs().max().item():.2f}  {len(os.listdir(folder))} files, {size} bytes")


# Experts as gpt-oss is published, in MXFP4; transformers' own function makes the weights of them.
def mxfp4(model):
    packed = {}
    for name, p in model.named_parameters():
        if p.ndim == 3:
            experts, rows, cols = p.shape
            blocks = torch.randint(0, 256, (experts, cols, rows // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, (experts, cols, rows // 32), dtype=torch.uint8)
            p.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float().contiguous()
            packed |= {name + "_blocks": blocks, name + "_scales": scales}

    def rewrite(folder):
        weights, config = os.path.join(folder, "model.safetensors"), os.path.join(folder, "config.json")
        save_file({k: v for k, v in load_file(weights).items() if k + "_blocks" not in packed} | packed, weights, {"format": "pt"})
        c = json.load(open(config)) | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
        json.dump(c, open(config, "w"), indent=2)
    return rewrite


def older_rope(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    rope = c.pop("rope_parameters")
    c["rope_theta"] = rope["rope_theta"]
    c["rope_scaling"] = {"type": rope["rope_type"]} | {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type")}
    c["torch_dtype"] = c.pop("dtype")
    json.dump(c, open(path, "w"), indent=2)


# As DeepSeek's folders have it.
def deepseek_keys(folder, v2):
    older_rope(folder)
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    c |= {"moe_layer_freq": 1, "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001, "scoring_func": "softmax" if v2 else "sigmoid"} | (
        {} if v2 else {"topk_method": "noaux_tc"})
    json.dump(c, open(path, "w"), indent=2)


# As Mistral's folders have it: what rope's share of a head is said by, beside its kind by both names.
def mistral4_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    c["rope_parameters"] |= {"type": "yarn", "partial_rotary_factor": c["qk_rope_head_dim"] / c["head_dim"], "max_position_embeddings": c["max_position_embeddings"]}
    c |= {"sliding_window": None}
    json.dump(c, open(path, "w"), indent=2)


# As LFM2's folders have it: the width of MLPs before it is made what it is, layers with attention by their numbers, and words that no class reads.
def lfm_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    c |= {"full_attn_idxs": [i for i, kind in enumerate(c["layer_types"]) if kind == "full_attention"], "block_ff_dim": c.pop("intermediate_size"), "tie_embedding": c.pop("tie_word_embeddings"),
          "rope_theta": c.pop("rope_parameters")["rope_theta"], "block_dim": c["hidden_size"], "conv_dim": c["hidden_size"], "block_norm_eps": 1e-5, "block_use_swiglu": True, "use_pos_enc": True}
    del c["layer_types"]
    json.dump(c, open(path, "w"), indent=2)


# Choices that go by biases, and scores of the chosen so small that what is added to their sum is seen.
def small_scores(model):
    for name, p in model.named_parameters():
        if name.endswith("feed_forward.gate.weight"):
            p.data *= 24
    for name, p in model.named_buffers():
        if name.endswith("expert_bias"):
            p[:-1] += 0.7


# As MiMo-V2-Flash's folder has it: by names that transformers passes over, of what its class does anyway; a layer that predicts further tokens.
def mimo_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    windows, sparse = c.pop("layer_types"), c.pop("mlp_layer_types")
    del c["rope_parameters"], c["rms_norm_eps"]
    c |= {"hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in windows], "moe_layer_freq": [int(kind == "sparse") for kind in sparse], "n_shared_experts": None,
          "routed_scaling_factor": None, "sliding_window_size": c["sliding_window"] - 1, "sliding_window": c["sliding_window"] - 1, "layernorm_epsilon": 1e-5,
          "partial_rotary_factor": 0.334, "rope_theta": 5000000, "swa_rope_theta": 10000, "swa_num_attention_heads": c["num_attention_heads"],
          "swa_num_key_value_heads": 2 * c["num_key_value_heads"], "swa_head_dim": c["head_dim"], "swa_v_head_dim": c["v_head_dim"], "scoring_func": "sigmoid",
          "topk_method": "noaux_tc", "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "attention_chunk_size": 128}
    json.dump(c, open(path, "w"), indent=2)
    path = os.path.join(folder, "model.safetensors")
    t = load_file(path)
    assert "model.layers.1.self_attn.attention_sink_bias" in t
    save_file(t | {"model.mtp.layers.0.eh_proj.weight": torch.zeros(4, 8)}, path, metadata={"format": "pt"})


# As Falcon-H1's folders have it: by older names, and more of what the class does anyway.
def falcon_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    c |= {"rope_theta": c.pop("rope_parameters")["rope_theta"], "rope_scaling": None, "mamba_use_mlp": True, "attn_layer_indices": None, "time_step_min": 0.001}
    json.dump(c, open(path, "w"), indent=2)


# As Trinity's folders have it: by older names, and more of what the class does anyway.
def afmoe_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    c |= {"rope_theta": c.pop("rope_parameters")["rope_theta"], "rope_scaling": None, "n_group": 1, "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1, "route_norm": True,
          "score_func": "sigmoid", "load_balance_coeff": 0.001, "use_grouped_mm": True}
    json.dump(c, open(path, "w"), indent=2)


# As Kimi-K2.5's folders have it: by their own names.
def kimi_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    text = c["text_config"]
    c["architectures"] = ["KimiK25ForConditionalGeneration"]
    c |= {"auto_map": {"AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration"}, "media_placeholder_token_id": 40, "use_unified_vision_chunk": True}
    text |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "moe_layer_freq": 1, "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001,
             "scoring_func": "sigmoid", "topk_method": "noaux_tc", "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}
    json.dump(c, open(path, "w"), indent=2)
    path = os.path.join(folder, "model.safetensors")  # transformers 5.24 calls layers of the text "blocks" too when it saves
    t = {n.replace("language_model.model.blocks.", "language_model.model.layers."): w for n, w in load_file(path).items()}
    save_file(t, path, metadata={"format": "pt"})


# As ERNIE 4.5's folders have it: keys that nothing looks at, and layers that predict further tokens.
def ernie_keys(folder):
    older_rope(folder)
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    c |= {"rope_scaling": None, "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True, "num_nextn_predict_layers": 1}
    json.dump(c, open(path, "w"), indent=2)
    path = os.path.join(folder, "model.safetensors")
    t = load_file(path)
    t |= {"model.mtp_block.0.self_attn.q_proj.weight": torch.zeros(3, 3), "model.mtp_emb_norm.0.weight": torch.zeros(4)}
    save_file(t, path, metadata={"format": "pt"})


# As who saves what transformers 5 has in memory: other names, and a layer's experts in two tensors.
def names_in_memory(folder):
    path = os.path.join(folder, "model.safetensors")
    t, experts = {}, {}
    for name, x in load_file(path).items():
        name = name.replace(".mlp.moe_statics.", ".mlp.gate.moe_statics.").replace(".router.gate.", ".gate.")
        name = name.replace(".mlp.expert_bias", ".mlp.e_score_correction_bias").replace(".shared_mlp.", ".shared_experts.")
        name = name.replace("backbone.", "model.")
        if ".experts." in name:
            layer, rest = name.split(".experts.")
            e, kind, _ = rest.split(".")
            experts.setdefault(f"{layer}.experts.", {})[int(e), kind] = x
        else:
            t[name] = x
    for name, each in experts.items():
        count = 1 + max(e for e, _ in each)
        gated = (0, "gate_proj") in each
        t[name + ("gate_up_proj" if gated else "up_proj")] = torch.stack([torch.cat([each[e, "gate_proj"], each[e, "up_proj"]]) if gated else each[e, "up_proj"]
                                                                          for e in range(count)])
        t[name + "down_proj"] = torch.stack([each[e, "down_proj"] for e in range(count)])
    save_file(t, path, metadata={"format": "pt"})


# As Hy3's folders have it: what its class does anyway, and a layer that predicts further tokens.
def hy_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    del c["mlp_layer_types"]
    c |= {"expert_hidden_dim": c["moe_intermediate_size"], "first_k_dense_replace": 1, "moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True,
          "qk_norm": True, "route_norm": True, "output_router_logits": True, "num_nextn_predict_layers": 1, "enable_lm_head_fp32": True}
    json.dump(c, open(path, "w"), indent=2)
    path = os.path.join(folder, "model.safetensors")
    t = load_file(path)
    t |= {"model.layers.3.eh_proj.weight": torch.zeros(4, 8), "model.layers.3.mlp.expert_bias": torch.zeros(3)}
    save_file(t, path, metadata={"format": "pt"})


# As Hunyuan-A13B's folder has it: what its class does not look at.
def hunyuan_keys(folder):
    older_rope(folder)
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    c |= {"moe_intermediate_size": [c["intermediate_size"]] * 2, "num_shared_expert": [1, 1], "moe_layer_num_skipped": 0, "use_mixed_mlp_moe": True, "use_qk_norm": True,
          "use_cla": False, "cla_share_factor": 2, "norm_type": "rms", "mlp_bias": False}
    json.dump(c, open(path, "w"), indent=2)


# As the folders of Granite 4 without experts have it: another word for attention, and what its class has for mamba layers.
def granite_keys(folder):
    older_rope(folder)
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    c |= {"layer_types": ["attention" if t == "full_attention" else "mamba" for t in c["layer_types"]], "init_method": "mup", "normalization_function": "rmsnorm"}
    json.dump(c, open(path, "w"), indent=2)


# And of those with mamba layers: their rope is said, and not used.
def mamba_keys(folder):
    granite_keys(folder)
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    del c["time_step_limit"]
    json.dump(c | {"position_embedding_type": "nope", "mamba_d_head": "auto"}, open(path, "w"), indent=2)


# As DeepSeek-V4 is published: without "model." in front of names, and with other keys.
def names_of_deepseek4(folder):
    path = os.path.join(folder, "model.safetensors")
    renamed = {name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_"): t for name, t in load_file(path).items()}
    save_file(renamed | {"mtp.0.norm.weight": torch.ones(3)}, path, metadata={"format": "pt"})
    path = os.path.join(folder, "config.json")
    with open(path) as f:
        keys = json.load(f)
    for name in ("rope_parameters", "partial_rotary_factor", "mlp_layer_types", "compress_rates", "layer_types"):
        del keys[name]
    keys |= {"num_hash_layers": 2, "compress_rate_csa": 4, "compress_rate_hca": 8, "compress_ratios": [128, 4, 0, 0], "rope_scaling": None}
    with open(path, "w") as f:
        json.dump(keys, f, indent=2)


# As Nemotron Nano's folders have it: a letter for each layer, places that its class has not, and the word that JSON has not.
def nemotron_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    c["hybrid_override_pattern"] = "".join(letters[kind] for kind in c.pop("layers_block_type", None) or c.pop("layer_types"))
    c |= {"num_hidden_layers": len(c["hybrid_override_pattern"]), "rope_theta": 10000, "partial_rotary_factor": 1.0, "sliding_window": None, "norm_eps": c["layer_norm_epsilon"],
          "time_step_limit": [0.0, math.inf], "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}}
    json.dump(c, open(path, "w"), indent=2)


# As Scout's folder has it: no list of layers, but numbers that stand for one.
def llama4_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    t = c.get("text_config", c)
    rope = t.pop("rope_parameters")
    t["rope_theta"] = rope["rope_theta"]
    t["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    del t["layer_types"], t["moe_layers"]
    t |= {"no_rope_layers": [], "for_llm_compressor": False, "torch_dtype": t.pop("dtype", "bfloat16")}
    json.dump(c, open(path, "w"), indent=2)


# As Command R7B's folder has it.
def cohere_keys(folder):
    older_rope(folder)
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    del c["layer_types"]
    c |= {"sliding_window_pattern": 4, "head_dim": c["hidden_size"] // c["num_attention_heads"], "cache_implementation": "hybrid", "order_of_interleaved_layers": "local_attn_first",
          "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
          "use_parallel_embedding": True}
    json.dump(c, open(path, "w"), indent=2)


# As MiniMax-M2's folders have it.
def minimax_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    rope = c.pop("rope_parameters")
    c |= {"rope_theta": rope["rope_theta"], "rotary_dim": int(rope["partial_rotary_factor"] * c["head_dim"]), "scoring_func": "sigmoid",
          "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "shared_intermediate_size": 0, "sliding_window": None,
          "attn_type_list": [1] * c["num_hidden_layers"], "num_mtp_modules": 3, "torch_dtype": c.pop("dtype")}
    json.dump(c, open(path, "w"), indent=2)


# As OLMo 3's folders have it: scaling is for layers without a window.
def olmo_rope(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    full = c.pop("rope_parameters")["full_attention"]
    del c["layer_types"]
    c |= {"rope_theta": full.pop("rope_theta"), "rope_scaling": full}
    json.dump(c, open(path, "w"), indent=2)


# As the first folders of Gemma have it: gelu, by which they mean that of tanh.
def first_gemma(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    c |= {"hidden_act": "gelu", "hidden_activation": None, "rope_theta": c.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    json.dump(c, open(path, "w"), indent=2)


# As GLM-4's folders have it: what the rope object says beside it.
def glm_rope(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    c |= {"rope_theta": c["rope_parameters"]["rope_theta"], "partial_rotary_factor": c.pop("rope_parameters")["partial_rotary_factor"]}
    json.dump(c, open(path, "w"), indent=2)


# As GPT-NeoX's and Pythia's folders have it: keys and buffers of their own.
def first_neox(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    rope = c.pop("rope_parameters")
    c |= {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": int(rope["rope_theta"])}
    json.dump(c, open(path, "w"), indent=2)
    path = os.path.join(folder, "model.safetensors")
    t = load_file(path)
    t["gpt_neox.layers.0.attention.bias"] = torch.tril(torch.ones(1, 1, 24, 24)).to(torch.uint8)
    t["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9).to(torch.float16)
    t["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.zeros(2)
    save_file(t, path, metadata={"format": "pt"})


# As some of OPT's folders have it: weights of the class without a head.
def first_opt(folder):
    path = os.path.join(folder, "model.safetensors")
    save_file({k.removeprefix("model."): v for k, v in load_file(path).items()}, path, metadata={"format": "pt"})


# As the folders of Phi-3 and Phi-4 have it.
def phi3_rope(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    c |= {"rope_theta": c.pop("rope_parameters")["rope_theta"], "rope_scaling": None, "partial_rotary_factor": 1.0,
          "original_max_position_embeddings": 48, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}
    json.dump(c, open(path, "w"), indent=2)


# As those of Phi-3 with 128k positions and of Phi-4-mini have it.
def long_rope(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    rope = c.pop("rope_parameters")
    c |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"],
          "rope_scaling": {"type": "longrope", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}}
    json.dump(c, open(path, "w"), indent=2)


# As Gemma 3's folders with images have it: what is the class's default is not there.
def bare_text(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    for key in ("num_attention_heads", "num_key_value_heads", "query_pre_attn_scalar", "tie_word_embeddings", "rms_norm_eps", "hidden_activation",
                "layer_types", "initializer_range"):
        del c["text_config"][key]
    c["text_config"].pop("rope_parameters")
    c["text_config"] |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 2}
    json.dump(c, open(path, "w"), indent=2)


# As Qwen2.5-VL's and Qwen2-VL's folders have it: the text's keys beside the others, rope by the name that older releases know.
def flat_text(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    text = c.pop("text_config")
    rope = text.pop("rope_parameters")
    del text["model_type"], text["layer_types"], text["pad_token_id"]
    c |= text | {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}, "sliding_window": 4096}
    json.dump(c, open(path, "w"), indent=2)


# As Qwen3-Next's folders have it: which layers are full by a number, rope beside the other keys, a layer that predicts further tokens.
def next_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    rope = c.pop("rope_parameters")
    c |= {"full_attention_interval": 1 + c.pop("layer_types").index("full_attention"), "rope_theta": rope["rope_theta"], "rope_scaling": None,
          "partial_rotary_factor": rope["partial_rotary_factor"], "torch_dtype": c.pop("dtype")}
    json.dump(c, open(path, "w"), indent=2)
    path = os.path.join(folder, "model.safetensors")
    save_file(load_file(path) | {"mtp.fc.weight": torch.zeros(4, 8), "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(3, 3)}, path, metadata={"format": "pt"})


# As Qwen3.5's folders have it: the same in the text's part, all experts in one tensor.
def images_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    text = c["text_config"]
    text |= {"full_attention_interval": 1 + text["layer_types"].index("full_attention"), "attn_output_gate": True, "mamba_ssm_dtype": "float32",
             "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    json.dump(c, open(path, "w"), indent=2)
    path = os.path.join(folder, "model.safetensors")
    t = load_file(path) | {"mtp.fc.weight": torch.zeros(4, 8), "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(3, 3)}
    for name in [name for name in t if name.endswith(".experts.0.down_proj.weight")]:
        base = name.removesuffix("0.down_proj.weight")
        count = sum(key.startswith(base) and key.endswith("down_proj.weight") for key in t)
        gate, up, down = (torch.stack([t.pop(f"{base}{e}.{kind}_proj.weight") for e in range(count)]) for kind in ("gate", "up", "down"))
        t |= {base + "gate_up_proj": torch.cat([gate, up], dim=1), base + "down_proj": down}
    save_file(t, path, metadata={"format": "pt"})


# As Qwen3-VL's mixtures are published: matrices of all experts (in, out), and no word on tied weights beside the text's sizes.
def turned_experts(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    text = c["text_config"]
    del text["tie_word_embeddings"], text["sliding_window"]
    text |= {"num_experts": text.pop("num_local_experts"), "norm_topk_prob": True, "rope_theta": text["rope_parameters"].pop("rope_theta")}
    text["rope_scaling"] = text.pop("rope_parameters")
    json.dump(c, open(path, "w"), indent=2)
    path = os.path.join(folder, "model.safetensors")
    t = load_file(path)
    save_file({k: v.transpose(1, 2).contiguous() if ".experts." in k else v for k, v in t.items()}, path, metadata={"format": "pt"})


# As Gemma 4's folders have it: the sizes of layers without a window beside the others; transformers writes them layer by layer.
def gemma4_keys(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    text = c.get("text_config", c)
    layers = list(text.pop("per_layer_config").values())
    text |= {"global_head_dim": layers[0]["head_dim"], "num_global_key_value_heads": layers[0].get("num_key_value_heads")}
    json.dump(c, open(path, "w"), indent=2)


# As they have it, texts are filled up with token 0. Its row of the embedding gets no gradient then; here it does, as every other.
def fills_up(model):
    model.config.text_config.pad_token_id = 0
    for table in model.modules():
        if isinstance(table, torch.nn.Embedding):
            table.padding_idx = None
    return gemma4_keys


# And those of its smaller sizes have what makes keys and values of layers that read another's too, which its class passes over.
def unread_keys(model):
    text = model.config.text_config

    def rewrite(folder):
        gemma4_keys(folder)
        path = os.path.join(folder, "model.safetensors")
        t = load_file(path)
        for layer in range(text.num_hidden_layers - text.num_kv_shared_layers, text.num_hidden_layers):
            heads, base = text.per_layer_config[layer], f"model.language_model.layers.{layer}.self_attn."
            width = heads.num_key_value_heads * heads.head_dim
            assert base + "q_proj.weight" in t and base + "k_proj.weight" not in t
            t |= {f"{base}{kind}_proj.weight": torch.ones(width, text.hidden_size, dtype=torch.bfloat16) for kind in "kv"}
            t[base + "k_norm.weight"] = torch.ones(heads.head_dim, dtype=torch.bfloat16)
        save_file(t, path, metadata={"format": "pt"})
    fills_up(model)
    return rewrite


def older_layers(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    full, local = (c["rope_parameters"][kind + "_attention"] for kind in ("full", "sliding"))
    del c["rope_parameters"], c["layer_types"]
    c |= {"rope_theta": full["rope_theta"], "rope_local_base_freq": local["rope_theta"], "sliding_window_pattern": 2,
          "rope_scaling": {"rope_type": full["rope_type"], "factor": full["factor"]}}
    json.dump(c, open(path, "w"), indent=2)


def older_experts(folder):
    path = os.path.join(folder, "config.json")
    c = json.load(open(path))
    c["num_experts"] = c.pop("num_local_experts")
    json.dump(c, open(path, "w"), indent=2)


# A layer behind the last one, which predicts further tokens.
def one_layer_more(folder):
    path = os.path.join(folder, "model.safetensors")
    t = load_file(path)
    t |= {"model.layers.3.eh_proj.weight": torch.zeros(4, 8), "model.layers.3.self_attn.q_proj.weight": torch.zeros(3, 3)}
    save_file(t, path, metadata={"format": "pt"})


def older_gpt2(folder):
    path = os.path.join(folder, "model.safetensors")
    t = {k.removeprefix("transformer."): v for k, v in load_file(path).items()}
    t["h.0.attn.bias"] = torch.tril(torch.ones(1, 1, 24, 24)).to(torch.float16)
    t["h.0.attn.masked_bias"] = torch.tensor(-1e4).to(torch.float16)
    t["lm_head.weight"] = t["lm_head.weight"].contiguous()
    save_file(t, path, metadata={"format": "pt"})


common = dict(vocab_size=41, hidden_size=20, intermediate_size=29, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
gpt2 = dict(vocab_size=41, n_embd=18, n_layer=2, n_head=3, n_positions=24, bos_token_id=1, eos_token_id=2)


def rope(theta, kind="default", **more):
    return {"rope_theta": theta, "rope_type": kind, **more}


def rope_any(rng, positions):
    theta = rng.choice([100.0, 1000.0, 10000.0, 1e6])
    kind = rng.choice(["default", "linear", "llama3", "yarn"])
    if kind == "linear":
        return rope(theta, kind, factor=rng.choice([1.0, 2.5, 4.0]))
    if kind == "llama3":
        return rope(theta, kind, factor=rng.choice([2.0, 8.0, 32.0]), low_freq_factor=1.0, high_freq_factor=rng.choice([2.0, 4.0]),
                    original_max_position_embeddings=rng.choice([8, 16, positions]))
    if kind == "yarn":
        return rope(theta, kind, factor=rng.choice([1.0, 4.0, 40.0]), original_max_position_embeddings=rng.choice([8, 16, positions]),
                    **rng.choice([{}, dict(truncate=False), dict(beta_fast=8.0, beta_slow=0.5), dict(attention_factor=0.9),
                                  dict(mscale=1.0, mscale_all_dim=0.5)]))
    return rope(theta)


# Seven wide at least: the gradient of a norm over one or two elements is nothing but rounding.
def random_case(rng, family):
    kv = rng.choice([1, 1, 2, 3])
    heads = kv * rng.choice([1, 2, 3])
    layers = rng.choice([1, 2, 3])
    tied = rng.random() < 0.5
    if family == "gpt2":
        return GPT2Config(vocab_size=rng.randrange(5, 70), n_embd=heads * rng.randrange(-(-7 // heads), 12), n_layer=layers, n_head=heads,
                          n_positions=rng.randrange(30, 50), n_inner=rng.choice([None, rng.randrange(3, 60)]),
                          activation_function=rng.choice(["gelu_new", "gelu_pytorch_tanh"]), tie_word_embeddings=tied,
                          layer_norm_epsilon=rng.choice([1e-5, 1e-6]), bos_token_id=1, eos_token_id=2)
    hidden = heads * rng.randrange(-(-7 // heads), 1 + max(40 // heads, 2))
    more = dict(vocab_size=rng.randrange(5, 70), hidden_size=hidden, intermediate_size=rng.randrange(3, 60), num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=48, head_dim=2 * rng.randrange(1, 9),
                tie_word_embeddings=tied, rms_norm_eps=rng.choice([1e-5, 1e-6]), rope_parameters=rope_any(rng, 48), bos_token_id=1,
                eos_token_id=2)
    window = rng.randrange(1, 12)
    if family == "gpt_neox":
        for key in ("num_key_value_heads", "head_dim", "rms_norm_eps"):
            del more[key]
        D = 4 * rng.randrange(2, 5)
        more["rope_parameters"] |= dict(partial_rotary_factor=rng.choice([0.25, 0.5, 1.0]) if D % 8 == 0 else rng.choice([0.5, 1.0]))
        return GPTNeoXConfig(**more | dict(hidden_size=heads * D), layer_norm_eps=rng.choice([1e-5, 1e-6]), attention_bias=rng.random() < 0.7,
                             use_parallel_residual=rng.random() < 0.6, hidden_act=rng.choice(["gelu", "gelu", "gelu_new", "gelu_fast", "relu"]))
    if family == "opt":
        sizes = {key: more[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "tie_word_embeddings")}
        return OPTConfig(**sizes, ffn_dim=more["intermediate_size"], activation_function=rng.choice(["relu", "relu", "gelu", "gelu_new"]),
                         enable_bias=rng.random() < 0.7, pad_token_id=None, bos_token_id=1, eos_token_id=2)
    if family in ("starcoder2", "stablelm"):
        eps = more.pop("rms_norm_eps")
        del more["head_dim"]
        D = 8 * rng.randrange(1, 4)
        more |= dict(hidden_size=heads * D)
        if family == "starcoder2":
            return Starcoder2Config(**more, norm_epsilon=eps, hidden_act=rng.choice(["gelu_pytorch_tanh", "gelu", "relu"]), use_bias=rng.random() < 0.7,
                                    sliding_window=rng.choice([None, window]))
        more["rope_parameters"] |= dict(partial_rotary_factor=rng.choice([0.25, 0.5, 1.0]))
        return StableLmConfig(**more, layer_norm_eps=eps, use_qkv_bias=rng.random() < 0.5, use_parallel_residual=rng.random() < 0.4)
    if family == "llama":
        return LlamaConfig(**more, attention_bias=rng.random() < 0.5, mlp_bias=rng.random() < 0.5)
    if family == "gemma3":
        local = rope(rng.choice([100.0, 10000.0]))
        pattern = rng.choice([1, 2, 3, 6])
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
        more |= dict(head_dim=more["head_dim"] + 6, rope_parameters={"full_attention": more["rope_parameters"], "sliding_attention": local})
        return Gemma3TextConfig(**more, query_pre_attn_scalar=rng.randrange(1, 40), sliding_window=window, layer_types=types, pad_token_id=None,
                                attention_bias=rng.random() < 0.3)
    if family == "gemma2":
        more |= dict(head_dim=more["head_dim"] + 6, rope_parameters=rope(more["rope_parameters"]["rope_theta"]))
        types = rng.choice([["sliding_attention", "full_attention"] * layers, ["full_attention"] * layers, ["sliding_attention"] * layers])
        return Gemma2Config(**more, query_pre_attn_scalar=rng.randrange(1, 40), sliding_window=window, layer_types=types[:layers], pad_token_id=None,
                            attention_bias=rng.random() < 0.3, attn_logit_softcapping=rng.choice([None, 0.7, 3.0, 50.0]),
                            final_logit_softcapping=rng.choice([None, 2.0, 30.0]))
    if family == "gemma":
        return GemmaConfig(**more, pad_token_id=None, attention_bias=rng.random() < 0.3)
    if family.startswith("granite"):
        del more["head_dim"]
        more |= dict(hidden_size=heads * 2 * rng.randrange(2, 9))
    if family == "llama4":
        experts, interval = rng.choice([1, 2, 3, 6, 9]), rng.choice([1, 2, 3, 4])
        return Llama4TextConfig(**more | dict(head_dim=more["head_dim"] + 6), pad_token_id=None, intermediate_size_mlp=rng.randrange(3, 60), num_local_experts=experts,
                                num_experts_per_tok=rng.choice([1, 1, min(experts, 2), min(experts, 4)]), interleave_moe_layer_step=rng.choice([1, 1, 2]),
                                use_qk_norm=rng.random() < 0.6, no_rope_layer_interval=interval, attention_bias=interval > layers and rng.random() < 0.5,
                                attention_chunk_size=rng.choice([None, window, 30]), attn_temperature_tuning=rng.random() < 0.7, floor_scale=rng.choice([1, 3, 8192]),
                                attn_scale=rng.choice([0.1, 0.7]))
    if family == "nemotron_h":
        kinds = rng.choice([["linear_attention"], ["full_attention", "mlp"], ["linear_attention", "full_attention", "mlp"], ["linear_attention", "full_attention", "mlp", "moe"],
                            ["linear_attention", "moe"]])
        groups, expert_groups = rng.choice([1, 2, 3]), rng.choice([1, 1, 2, 3])
        experts = expert_groups * rng.choice([2, 3])
        del more["rope_parameters"], more["num_hidden_layers"]
        more["tie_word_embeddings"] = False  # whose class ties none
        return NemotronHConfig(**more | dict(head_dim=2 * rng.randrange(2, 9)), pad_token_id=None, layers_block_type=[rng.choice(kinds) for _ in range(1 + layers)], mamba_num_heads=groups * rng.choice([1, 2, 3]),
                               mamba_head_dim=8 * rng.randrange(1, 4), n_groups=groups, ssm_state_size=8 * rng.randrange(1, 5), conv_kernel=rng.randrange(2, 7),
                               use_conv_bias=rng.random() < 0.6, time_step_min=rng.choice([0.001, 0.001, 0.3]), mlp_bias=rng.random() < 0.3, n_routed_experts=experts,
                               n_group=expert_groups, topk_group=(chosen := rng.randrange(1, expert_groups + 1)), num_experts_per_tok=rng.randrange(1, chosen * experts // expert_groups + 1),
                               norm_topk_prob=rng.random() < 0.7, routed_scaling_factor=rng.choice([1.0, 2.5]), moe_intermediate_size=rng.randrange(3, 30),
                               moe_shared_expert_intermediate_size=rng.randrange(3, 40), moe_latent_size=rng.choice([None, None, rng.randrange(3, 20)]))
    if family == "granitemoehybrid":  # without rope a bias of the keys changes nothing
        turned, expand, head, experts = rng.random() < 0.6, rng.choice([1, 2, 3]), rng.choice([8, 16, 24]), rng.choice([0, 1, 4, 7])
        more["hidden_size"] = heads * 2 * head
        return GraniteMoeHybridConfig(**more, pad_token_id=None, attention_bias=turned and rng.random() < 0.3, embedding_multiplier=rng.choice([1, 12.0]),
                                      residual_multiplier=rng.choice([1.0, 0.22]), attention_multiplier=rng.choice([0.1, 0.5]), logits_scaling=rng.choice([1.0, 16.0]),
                                      shared_intermediate_size=rng.randrange(3, 60), position_embedding_type="rope" if turned else None,
                                      num_local_experts=experts, num_experts_per_tok=rng.randrange(1, experts + 1) if experts > 0 else 0, layer_types=[rng.choice(["full_attention", "linear_attention"]) for _ in range(layers)],
                                      mamba_n_heads=expand * more["hidden_size"] // head, mamba_n_groups=rng.choice([1, 2]), mamba_d_head=head, mamba_expand=expand, mamba_d_state=8 * rng.randrange(1, 5),
                                      mamba_d_conv=rng.randrange(2, 7), mamba_conv_bias=rng.random() < 0.6)
    if family == "granite":
        return GraniteConfig(**more, pad_token_id=None, attention_bias=rng.random() < 0.3, mlp_bias=rng.random() < 0.3, embedding_multiplier=rng.choice([1, 12.0]),
                             residual_multiplier=rng.choice([1.0, 0.22]), attention_multiplier=rng.choice([0.1, 0.5]), logits_scaling=rng.choice([1.0, 16.0]))
    if family == "bamba":
        groups, head = rng.choice([1, 2]), rng.choice([8, 16])
        expand, D = rng.choice([1, 2]), 4 * rng.randrange(1, 5)
        more["hidden_size"] = heads * 2 * head
        more["rope_parameters"] |= dict(partial_rotary_factor=rng.choice([0.5, 0.5, 1.0]))
        return BambaConfig(**more | dict(head_dim=D), pad_token_id=None, attn_layer_indices=rng.choice([None, [i for i in range(layers) if rng.random() < 0.5]]), attention_bias=rng.random() < 0.4,
                           mlp_bias=rng.random() < 0.4, mamba_n_heads=expand * more["hidden_size"] // head, mamba_d_head=head, mamba_n_groups=groups, mamba_d_state=8 * rng.randrange(1, 5),
                           mamba_d_conv=rng.randrange(2, 7), mamba_expand=expand, mamba_conv_bias=rng.random() < 0.6)
    if family in ("lfm2", "lfm2_moe"):
        more |= dict(norm_eps=more.pop("rms_norm_eps"), head_dim=more["head_dim"] + 6, layer_types=[rng.choice(["conv", "full_attention"]) for _ in range(layers)], conv_L_cache=rng.randrange(2, 7))
        if family == "lfm2":
            return Lfm2Config(**more, pad_token_id=None, **rng.choice([dict(block_auto_adjust_ff_dim=False), dict(block_multiple_of=rng.choice([1, 8]), block_ffn_dim_multiplier=rng.choice([1.0, 1.3]))]))
        experts = rng.choice([1, 2, 3, 6, 9])
        return Lfm2MoeConfig(**more, pad_token_id=None, num_experts=experts, num_experts_per_tok=rng.randrange(1, 1 + min(experts, 4)), moe_intermediate_size=rng.randrange(3, 30),
                             num_dense_layers=rng.randrange(layers + 1), norm_topk_prob=rng.random() < 0.7, routed_scaling_factor=rng.choice([1.0, 2.5]))
    if family == "afmoe":
        experts, pattern = rng.choice([1, 2, 3, 6, 9]), rng.choice([1, 2, 3, 4])
        return AfmoeConfig(**more | dict(head_dim=more["head_dim"] + 6), pad_token_id=None, sliding_window=window, global_attn_every_n_layers=pattern, attention_bias=rng.random() < 0.4,
                           num_experts=experts, num_experts_per_tok=rng.randrange(1, 1 + min(experts, 4)), moe_intermediate_size=rng.randrange(3, 30), num_shared_experts=rng.choice([1, 2]),
                           num_dense_layers=rng.randrange(layers + 1), route_scale=rng.choice([1.0, 2.826]), mup_enabled=rng.random() < 0.6)
    if family == "olmo_hybrid":  # files of equal parts, as transformers saves them
        layers, every, K = max(layers, 2), rng.choice([2, 3, 4]), 8 * rng.randrange(1, 3)
        del more["head_dim"]
        more |= dict(num_hidden_layers=layers, hidden_size=heads * 2 * rng.randrange(3, 9), linear_num_key_heads=2, linear_num_value_heads=rng.choice([2, 4] if K == 16 else [2]), linear_key_head_dim=K)
        return OlmoHybridConfig(**more | dict(linear_value_head_dim=2 * K // more["linear_num_value_heads"]), pad_token_id=None, attention_bias=rng.random() < 0.4,
                                linear_conv_kernel_dim=rng.randrange(2, 7), linear_allow_neg_eigval=rng.random() < 0.6,
                                layer_types=["full_attention" if (i + 1) % min(every, layers) == 0 else "linear_attention" for i in range(layers)])
    if family == "falcon_h1":
        head, mamba_heads, any_of = rng.choice([8, 16]), rng.choice([2, 4]), lambda *some: rng.choice([1.0, *some])
        return FalconH1Config(**more, pad_token_id=None, attention_bias=rng.random() < 0.4, mlp_bias=rng.random() < 0.4, mamba_n_heads=mamba_heads, mamba_n_groups=rng.choice([1, 2]),
                              mamba_d_head=rng.choice([head, "auto"]), mamba_d_ssm=mamba_heads * head, mamba_d_state=8 * rng.randrange(1, 5), mamba_d_conv=rng.randrange(2, 7),
                              mamba_conv_bias=rng.random() < 0.6, mamba_rms_norm=rng.random() < 0.6, mamba_norm_before_gate=rng.random() < 0.5, lm_head_multiplier=any_of(0.04, 0.7),
                              embedding_multiplier=any_of(5.6), mlp_multipliers=rng.choice([None, [0.9, 0.3]]), key_multiplier=any_of(0.4), attention_in_multiplier=any_of(1.3),
                              attention_out_multiplier=any_of(0.9), ssm_in_multiplier=any_of(1.25), ssm_out_multiplier=any_of(0.24), ssm_multipliers=rng.choice([None, [0.35, 0.25, 0.4, 0.5, 0.3]]))
    if family == "kimi_linear":
        layers, groups, heads = max(layers, 2), rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 3])
        experts = groups * rng.randrange(2, 5)
        for key in ("head_dim", "rope_parameters", "num_key_value_heads"):
            del more[key]
        own, shared = rng.randrange(3, 9), 2 * rng.randrange(1, 4)
        kinds = [rng.choice(["linear_attention", "linear_attention", "full_attention"]) for _ in range(layers)]
        return KimiLinearConfig(**more | dict(tie_word_embeddings=False, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads), pad_token_id=None, layer_types=kinds, linear_head_dim=8 * rng.randrange(1, 4),
                                linear_num_heads=rng.choice([1, 2, 3]), linear_conv_kernel_dim=rng.randrange(2, 7), kv_lora_rank=rng.randrange(3, 20), q_lora_rank=rng.choice([None, None, rng.randrange(3, 20)]),
                                qk_nope_head_dim=own, qk_rope_head_dim=shared, v_head_dim=rng.randrange(3, 1 + min(own + shared, 12)), attention_bias=rng.random() < 0.3, num_local_experts=experts,
                                num_experts_per_tok=rng.randrange(1, 1 + min(2 * groups, 4)), n_group=groups, topk_group=groups if groups < 3 else 2, n_shared_experts=rng.choice([1, 2]),
                                moe_intermediate_size=rng.randrange(3, 30), first_k_dense_replace=rng.randrange(layers), norm_topk_prob=rng.random() < 0.7, routed_scaling_factor=rng.choice([1.0, 2.446]))
    if family == "seed_oss":
        return SeedOssConfig(**more, pad_token_id=None, attention_bias=rng.random() < 0.6, attention_out_bias=rng.random() < 0.3, mlp_bias=rng.random() < 0.3)
    if family == "ministral3":
        more["rope_parameters"] = rope(1000.0, "yarn", factor=rng.choice([4.0, 16.0]), original_max_position_embeddings=rng.choice([3, 8, 16]),
                                       llama_4_scaling_beta=rng.choice([0.1, 0.5]), **rng.choice([{}, dict(mscale=1.0, mscale_all_dim=1.0)]))
        return Ministral3Config(**more, pad_token_id=None)
    if family in ("glm", "glm4"):
        D = more["head_dim"] = 4 * rng.randrange(1, 5)
        more["rope_parameters"] |= dict(partial_rotary_factor=rng.choice([0.5, 1.0]))
        return (GlmConfig if family == "glm" else Glm4Config)(**more, pad_token_id=None, attention_bias=rng.random() < 0.6)
    if family == "ernie4_5":
        return Ernie4_5Config(**more, pad_token_id=None, use_bias=rng.random() < 0.5)
    if family == "ernie4_5_moe":
        experts = rng.choice([1, 2, 3, 6, 9])
        return Ernie4_5_MoeConfig(**more, pad_token_id=None, moe_num_experts=experts, moe_k=rng.randrange(1, 1 + min(experts, 4)),
                                  moe_intermediate_size=rng.randrange(3, 30), moe_num_shared_experts=rng.choice([0, 1, 2]),
                                  moe_layer_start_index=rng.randrange(layers + 1), moe_layer_interval=rng.choice([1, 1, 2]))
    if family == "hy_v3":
        experts, first = rng.choice([1, 2, 3, 6, 9]), rng.randrange(layers + 1)
        return HYV3Config(**more | dict(head_dim=more["head_dim"] + 6), pad_token_id=None, attention_bias=rng.random() < 0.5, mlp_bias=rng.random() < 0.4,
                          num_experts=experts, num_experts_per_tok=rng.randrange(1, 1 + min(experts, 4)), num_shared_experts=rng.choice([1, 2]),
                          moe_intermediate_size=rng.randrange(3, 30), router_scaling_factor=rng.choice([1.0, 2.826]),
                          enable_moe_fp32_combine=rng.random() < 0.5, mlp_layer_types=["dense"] * first + ["sparse"] * (layers - first))
    if family.startswith("hunyuan"):
        more["head_dim"] += 6  # which it norms
        if rng.random() < 0.5:
            more["rope_parameters"] = rope(1000.0, "dynamic", alpha=rng.choice([3.0, 1000.0]), factor=1.0)
        more |= dict(pad_token_id=None, attention_bias=rng.random() < 0.5)
        if family == "hunyuan_v1_dense":
            return HunYuanDenseV1Config(**more)
        experts = rng.choice([1, 2, 3, 6, 9])
        choices = rng.randrange(1, 1 + min(experts, 4))
        return HunYuanMoEV1Config(**more, num_experts=experts, moe_topk=rng.choice([choices, [choices] * layers]))
    if family.startswith("cohere"):
        more |= dict(hidden_size=heads * 2 * rng.randrange(4, 9), layer_norm_eps=more.pop("rms_norm_eps"), pad_token_id=None, attention_bias=rng.random() < 0.3,
                     logit_scale=rng.choice([0.0625, 0.25, 0.8333333]))
        del more["head_dim"]
        if family == "cohere":
            return CohereConfig(**more)
        pattern = rng.choice([1, 2, 3, 4])
        return Cohere2Config(**more, sliding_window=window, layer_types=["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)])
    if family == "exaone4":
        more["head_dim"] += 6
        types = ["sliding_attention" if rng.random() < 0.5 else "full_attention"] * layers
        more |= rng.choice([dict(sliding_window=None, layer_types=["full_attention"] * layers), dict(sliding_window=window, layer_types=types),
                            dict(sliding_window=window, sliding_window_pattern=rng.choice([2, 3, 4]))])
        return Exaone4Config(**more, pad_token_id=None)
    if family == "exaone_moe":
        more["head_dim"] += 6
        pattern, groups, first = rng.choice([1, 2, 3, 4]), rng.choice([1, 1, 2]), rng.randrange(layers + 1)
        few = rng.randrange(1, groups + 1)
        experts = groups * rng.randrange(2, 4)
        return ExaoneMoeConfig(**more, pad_token_id=None, sliding_window=window, num_experts=experts, n_group=groups, topk_group=few,
                               layer_types=["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)],
                               num_experts_per_tok=rng.randrange(1, 1 + min(few * (experts // groups), 4)), num_shared_experts=rng.choice([1, 2]),
                               moe_intermediate_size=rng.randrange(3, 30), norm_topk_prob=rng.random() < 0.7, routed_scaling_factor=rng.choice([1.0, 2.5]),
                               mlp_layer_types=["dense"] * first + ["sparse"] * (layers - first))
    if family == "olmo3":
        pattern = rng.choice([1, 2, 3, 4])
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
        more |= dict(rope_parameters={"full_attention": more["rope_parameters"], "sliding_attention": rope(rng.choice([100.0, 10000.0]))})
        return Olmo3Config(**more, pad_token_id=None, attention_bias=rng.random() < 0.5, sliding_window=window, layer_types=types)
    if family == "olmo2":
        return Olmo2Config(**more, pad_token_id=None, attention_bias=rng.random() < 0.5)
    if family == "mistral":
        return MistralConfig(**more, sliding_window=rng.choice([None, window]))
    if family == "qwen2":
        return Qwen2Config(**more, use_sliding_window=rng.random() < 0.6, sliding_window=window, max_window_layers=rng.randrange(layers + 1))
    if family == "phi3":  # whose class has plain rope and a longrope, of whole heads or a part, and checks lists by heads of this size
        D = 2 * rng.randrange(4, 9)
        k = rng.choice([k for k in range(1, D // 2 + 1) if int(D * (2 * k / D)) == 2 * k])
        more |= dict(hidden_size=heads * D, head_dim=D)
        more["rope_parameters"] = rope(more["rope_parameters"]["rope_theta"], partial_rotary_factor=2 * k / D)
        original = rng.choice([2, 8, 48])
        if rng.random() < 0.7:
            lists = {name: [rng.uniform(1, 9) for _ in range(k)] for name in ("short_factor", "long_factor")}
            more["rope_parameters"] |= dict(rope_type="longrope", **lists, **rng.choice([{}, dict(factor=3.0), dict(attention_factor=1.2)]))
        return Phi3Config(**more, original_max_position_embeddings=original, sliding_window=rng.choice([None, window]), pad_token_id=None)
    if family == "smollm3":
        return SmolLM3Config(**more, attention_bias=rng.random() < 0.3, mlp_bias=rng.random() < 0.3, no_rope_layer_interval=rng.randrange(1, 5),
                             pad_token_id=None)
    if family == "deepseek_v4":
        D, groups, experts, few = 2 * rng.randrange(4, 9), heads if rng.random() < 0.5 else 1, rng.choice([2, 3, 6, 9]), rng.randrange(2, 7)
        turned, by_table = 2 * rng.randrange(1, D // 2 + 1), rng.randrange(layers + 1)
        kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
        theta = rope(rng.choice([100.0, 10000.0]))
        if rng.random() < 0.5:
            theta = rope(1000.0, "yarn", factor=rng.choice([4.0, 16.0]), original_max_position_embeddings=rng.choice([8, 16]), beta_fast=rng.choice([4.0, 32.0]), beta_slow=1.0)
        for key in ("intermediate_size", "num_key_value_heads"):
            del more[key]
        more |= dict(head_dim=D, rope_parameters=theta, compress_rope_theta=rng.choice([100.0, 160000.0]))
        return DeepseekV4Config(**more | dict(bos_token_id=None, eos_token_id=None), pad_token_id=None, qk_rope_head_dim=turned, q_lora_rank=rng.randrange(7, 15), o_groups=groups,
                                o_lora_rank=rng.randrange(2, 12), n_routed_experts=experts, num_experts_per_tok=rng.randrange(1, min(experts, 4)), sliding_window=window,
                                moe_intermediate_size=rng.randrange(3, 30), routed_scaling_factor=rng.choice([1.0, 1.5]), hc_mult=rng.choice([1, 2, 3, 4, 4]),
                                hc_sinkhorn_iters=rng.choice([1, 2, 5, 20]), hc_eps=rng.choice([1e-6, 1e-3]), index_topk=rng.choice([1, 2, 3, 30]), index_n_heads=rng.randrange(1, 4),
                                index_head_dim=turned + 2 * rng.randrange(1, 4), layer_types=[rng.choice(kinds) for _ in range(layers)],
                                compress_rates={"compressed_sparse_attention": few, "heavily_compressed_attention": few * rng.randrange(2, 4)},
                                mlp_layer_types=["hash_moe"] * by_table + ["moe"] * (layers - by_table))
    experts = rng.choice([1, 2, 3, 6, 9])
    some = dict(num_local_experts=experts, num_experts_per_tok=rng.randrange(1, 1 + min(experts, 4)))
    if family == "mixtral":
        return MixtralConfig(**more, **some, sliding_window=rng.choice([None, window]))
    if family == "qwen2_moe":
        some["num_experts"] = some.pop("num_local_experts")
        return Qwen2MoeConfig(**more, **some, qkv_bias=rng.random() < 0.7, norm_topk_prob=rng.random() < 0.5,
                              moe_intermediate_size=rng.randrange(3, 30), shared_expert_intermediate_size=rng.randrange(3, 40))
    if family == "olmoe":
        del more["head_dim"]
        more |= dict(hidden_size=heads * 2 * rng.randrange(4, 9))
        some["num_experts"] = some.pop("num_local_experts")
        return OlmoeConfig(**more, **some, pad_token_id=None, norm_topk_prob=rng.random() < 0.5, attention_bias=rng.random() < 0.5)
    if family == "gpt_oss":
        more |= dict(hidden_size=8 * rng.randrange(1, 5), rope_parameters=rope(1000.0, "yarn", factor=rng.choice([4.0, 32.0]), truncate=rng.random() < 0.5,
                                                                              original_max_position_embeddings=rng.choice([8, 16, 4096])))
        types = rng.choice([["sliding_attention", "full_attention"] * layers, ["full_attention"] * layers])
        return GptOssConfig(**more, **some, pad_token_id=None, sliding_window=window, layer_types=types[:layers], attention_bias=rng.random() < 0.7)
    if family == "minimax_m2":
        D = more["head_dim"] = 4 * rng.randrange(1, 5)
        more["rope_parameters"] = rope(more["rope_parameters"]["rope_theta"], partial_rotary_factor=rng.choice([0.5, 1.0]))
        return MiniMaxM2Config(**more, **some, pad_token_id=None)
    if family in ("glm4_moe", "dots1", "solar_open", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa", "mistral4", "mimo_v2_flash"):
        groups = rng.choice([1, 1, 2, 3])
        few = rng.randrange(1, groups + 1)
        experts = groups * rng.randrange(2, 4)
        choices = rng.randrange(1, 1 + min(few * (experts // groups), 4))
        more |= dict(pad_token_id=None, n_routed_experts=experts, num_experts_per_tok=choices, n_group=groups, topk_group=few,
                     n_shared_experts=rng.choice([1, 2]), moe_intermediate_size=rng.randrange(3, 30), attention_bias=rng.random() < 0.5,
                     routed_scaling_factor=rng.choice([1.0, 2.5]))
        if family == "dots1":
            more["head_dim"] += 6  # which it norms
            types = ["full_attention"] * (first := rng.randrange(layers + 1)) + ["sliding_attention"] * (layers - first)
            return Dots1Config(**more, norm_topk_prob=rng.random() < 0.5, first_k_dense_replace=rng.randrange(layers + 1), sliding_window=window,
                               max_window_layers=first, layer_types=types)
        if family == "solar_open":
            del more["intermediate_size"]
            more["head_dim"] = 4 * rng.randrange(2, 5)
            return SolarOpenConfig(**more, norm_topk_prob=rng.random() < 0.7)
        if family == "glm4_moe":
            more["head_dim"] = 4 * rng.randrange(2, 5)
            more["rope_parameters"] = rope(more["rope_parameters"]["rope_theta"], partial_rotary_factor=rng.choice([0.5, 1.0]))
            return Glm4MoeConfig(**more, norm_topk_prob=rng.random() < 0.7, use_qk_norm=rng.random() < 0.5, num_mtp_layers=0,
                                 first_k_dense_replace=rng.randrange(layers + 1))
        if family == "mimo_v2_flash":
            del more["n_shared_experts"]
            D, first, plain, every = 4 * rng.randrange(2, 5), rng.randrange(layers + 1), rng.randrange(layers + 1), rng.choice([2, 3, 4])
            turned = dict(partial_rotary_factor=rng.choice([0.5, 1.0]))
            return MiMoV2FlashConfig(**more | dict(num_attention_heads=2 * heads, head_dim=D, rope_parameters={"full_attention": rope(1000.0, **turned), "sliding_attention": rope(100.0, **turned)}),
                                     v_head_dim=rng.randrange(1, D + 1), norm_topk_prob=rng.random() < 0.7, sliding_window=window, attention_value_scale=rng.choice([None, 0.707, 0.3]),
                                     layer_types=["full_attention" if i < plain or (i + 1) % every == 0 else "sliding_attention" for i in range(layers)],
                                     mlp_layer_types=["dense"] * first + ["sparse"] * (layers - first))
        del more["head_dim"]
        turned, own = 2 * rng.randrange(1, 4), 2 * rng.randrange(1, 5)  # even, as the class of V2 looks at them
        more |= dict(num_key_value_heads=heads, kv_lora_rank=2 * rng.randrange(4, 8), q_lora_rank=rng.choice([None, rng.randrange(7, 15)]), qk_nope_head_dim=own,
                     qk_rope_head_dim=turned, v_head_dim=rng.randrange(1, own + turned + 1))
        more["rope_parameters"] = rope(1000.0)
        if rng.random() < 0.5:
            more["rope_parameters"] = rope(1000.0, "yarn", factor=rng.choice([4.0, 40.0]), original_max_position_embeddings=rng.choice([8, 16]),
                                           **rng.choice([{}, dict(mscale=0.7, mscale_all_dim=1.2), dict(mscale=1.0, mscale_all_dim=1.0)]))
        if family in ("deepseek_v32", "glm_moe_dsa"):
            first, more["q_lora_rank"] = rng.randrange(layers + 1), rng.randrange(7, 15)
            more |= dict(norm_topk_prob=rng.random() < 0.7, mlp_layer_types=["dense"] * first + ["sparse"] * (layers - first), index_topk=rng.choice([1, 3, 7, 30]),
                         index_n_heads=rng.randrange(1, 4), index_head_dim=turned + 2 * rng.randrange(1, 4))
            if family == "deepseek_v32":
                return DeepseekV32Config(**more)
            return GlmMoeDsaConfig(**more, index_topk_freq=rng.choice([1, 2, 3]), index_skip_topk_offset=rng.choice([1, 2, 3]))
        if family == "mistral4":
            more |= dict(rope_parameters=rope(1000.0, "yarn", factor=rng.choice([4.0, 16.0]), original_max_position_embeddings=rng.choice([3, 8, 16]), llama_4_scaling_beta=rng.choice([0.1, 0.5]),
                                              **rng.choice([{}, dict(mscale=1.0, mscale_all_dim=1.0), dict(mscale=0.7, mscale_all_dim=1.2)])))
            return Mistral4Config(**more | dict(n_group=1, topk_group=1, num_experts_per_tok=rng.randrange(1, 1 + min(experts, 4))), norm_topk_prob=rng.random() < 0.7,
                                  rope_interleave=rng.random() < 0.5, first_k_dense_replace=rng.randrange(layers + 1))
        if family == "glm4_moe_lite":
            first = rng.randrange(layers + 1)
            return Glm4MoeLiteConfig(**more, norm_topk_prob=rng.random() < 0.7, rope_interleave=rng.random() < 0.5,
                                     mlp_layer_types=["dense"] * first + ["sparse"] * (layers - first))
        more |= dict(first_k_dense_replace=rng.randrange(layers + 1))
        if family == "deepseek_v2":
            return DeepseekV2Config(**more, topk_method=rng.choice(["greedy", "group_limited_greedy"]))
        return DeepseekV3Config(**more, norm_topk_prob=rng.random() < 0.7, rope_interleave=rng.random() < 0.5)
    more["head_dim"] += 6  # which it norms
    if family in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        key_heads = rng.choice([1, 1, 2, 3])
        more |= dict(pad_token_id=None, head_dim=8 * rng.randrange(1, 3), rope_parameters=rope(1000.0, partial_rotary_factor=rng.choice([0.25, 0.5, 1.0])),
                     full_attention_interval=rng.choice([1, 2, 2, 3, 4]), linear_num_key_heads=key_heads, linear_num_value_heads=key_heads * rng.choice([1, 2, 3]),
                     linear_key_head_dim=8 * rng.randrange(1, 4), linear_value_head_dim=8 * rng.randrange(1, 4), linear_conv_kernel_dim=rng.randrange(2, 7))
        if family == "qwen3_5":
            return Qwen3_5TextConfig(**more)
        some["num_experts"] = some.pop("num_local_experts")
        some |= dict(moe_intermediate_size=rng.randrange(3, 30), shared_expert_intermediate_size=rng.randrange(3, 40))
        if family == "qwen3_5_moe":
            del more["intermediate_size"]
            return Qwen3_5MoeTextConfig(**more, **some)
        return Qwen3NextConfig(**more, **some, norm_topk_prob=rng.random() < 0.7, decoder_sparse_step=rng.choice([1, 1, 2]))
    if family.startswith("gemma4"):
        every = rng.choice([1, 2, 3])
        layers = every * rng.choice([1, 2, 3] if every == 1 else [1, 2])
        window = max(window, 2)  # with one key a query's gradient is nothing but rounding, and scores that nothing divides show it
        full = rope(1000.0, "proportional", partial_rotary_factor=rng.choice([0.25, 0.5, 1.0]), **rng.choice([{}, dict(factor=2.5)]))
        more |= dict(pad_token_id=None, hidden_size_per_layer_input=0, global_head_dim=8 * rng.randrange(1, 5), num_global_key_value_heads=rng.choice([1, heads]),
                     attention_k_eq_v=rng.random() < 0.6, sliding_window=window, num_hidden_layers=layers,
                     layer_types=(["sliding_attention"] * (every - 1) + ["full_attention"]) * (layers // every),
                     final_logit_softcapping=rng.choice([None, 5.0, 30.0]), rope_parameters={"full_attention": full, "sliding_attention": rope(100.0)})
        if family == "gemma4":
            return Gemma4TextConfig(**more)
        if family == "gemma4_small":  # whose class cannot have readers alone; the last layers of a kind have one of it in front of them
            more |= dict(num_kv_shared_layers=rng.randrange(layers - every + 1), use_double_wide_mlp=rng.random() < 0.6,
                         hidden_size_per_layer_input=rng.randrange(7, 20), vocab_size_per_layer_input=more["vocab_size"] + rng.choice([0, 3]))
            return Gemma4TextConfig(**more)
        return Gemma4TextConfig(**more, enable_moe_block=True, num_experts=experts, top_k_experts=some["num_experts_per_tok"],
                                moe_intermediate_size=rng.randrange(3, 30))
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**more, **some, attention_bias=rng.random() < 0.5, norm_topk_prob=rng.random() < 0.5,
                              use_sliding_window=rng.random() < 0.5, sliding_window=window, moe_intermediate_size=rng.randrange(3, 30))
    return Qwen3Config(**more, attention_bias=rng.random() < 0.5, use_sliding_window=rng.random() < 0.6, sliding_window=window,
                       max_window_layers=rng.randrange(layers + 1))


def make_random(seed, count, out):
    rng = random.Random(seed)
    families = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "phi3", "smollm3", "qwen2_moe", "olmo2", "gemma3", "gemma2",
                "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minimax_m2", "olmo3", "gemma", "granite", "olmoe", "seed_oss",
                "glm", "glm4", "ernie4_5", "exaone4", "ministral3", "gpt_neox",
                "opt", "starcoder2", "stablelm", "qwen3_5", "qwen3_5_moe", "qwen3_next", "gemma4", "gemma4_moe", "gemma4_small", "dots1", "solar_open",
                "ernie4_5_moe", "hy_v3", "hunyuan_v1_dense", "hunyuan_v1_moe",
                "cohere", "cohere2", "granitemoehybrid", "llama4", "deepseek_v32", "glm_moe_dsa", "exaone_moe", "nemotron_h", "deepseek_v4", "mistral4", "mimo_v2_flash", "lfm2", "lfm2_moe", "bamba", "afmoe", "olmo_hybrid", "falcon_h1", "kimi_linear"]
    for i in range(count):
        family = families[i % len(families)]
        config = random_case(rng, family)
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        shard, seed, B, T = rng.choice([None, "6KB"]), rng.randrange(1 << 30), rng.randrange(1, 4), rng.randrange(2, 30)
        for more in range(100):
            try:
                make(f"{i:03}_{family}", config, dtype, shard, out=out, seed=seed + more, B=B, T=T, double=True,
                     # Gemma 4's scores are large, as nothing divides them: how their last bit is rounded shows, and one way may be lucky.
                     # So do Sinkhorn's rounds and scores of keys that are values.
                     # A beta of 2 turns what a state has for a key round, so that fewer of its roundings are forgotten.
                     wide=family.startswith("gemma4") or family in ("deepseek_v4", "olmo_hybrid"))
                break
            except CloseChoice as close:
                if more == 99:
                    raise close


if __name__ == "__main__" and sys.argv[1:2] == ["--random"]:
    make_random(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
elif __name__ == "__main__":
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    make("gpt2", GPT2Config(**gpt2), bf16)
    make("gpt2_untied", GPT2Config(**gpt2, n_inner=31, tie_word_embeddings=False, activation_function="gelu_pytorch_tanh"), f16,
         rewrite=older_gpt2)
    make("llama", LlamaConfig(**common | dict(hidden_size=18, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True)), f32)
    make("llama3", LlamaConfig(**common, head_dim=10, attention_bias=True, mlp_bias=True,
                               rope_parameters=rope(500.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                    original_max_position_embeddings=48)), bf16, shard="4KB")
    make("llama_linear", LlamaConfig(**common, head_dim=8, rope_parameters=rope(1000.0, "linear", factor=2.5)), f16, rewrite=older_rope)
    make("llama_yarn", LlamaConfig(**common, head_dim=12, rope_parameters=rope(
        50.0, "yarn", factor=4.0, beta_fast=5.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=0.3, truncate=False,
        original_max_position_embeddings=48)), bf16)
    make("mistral", MistralConfig(**common, head_dim=6, sliding_window=5), bf16)
    make("mistral_full", MistralConfig(**common | dict(num_key_value_heads=4), head_dim=12, sliding_window=None,
                                       tie_word_embeddings=True), f16)
    qwen2 = common | dict(hidden_size=24)
    make("qwen2", Qwen2Config(**qwen2, tie_word_embeddings=True, rope_parameters=rope(1e6)), bf16, shard="6KB")
    make("qwen2_yarn", Qwen2Config(**qwen2, rope_parameters=rope(20.0, "yarn", factor=2.5, original_max_position_embeddings=24)), f16,
         rewrite=older_rope)
    make("qwen2_window", Qwen2Config(**qwen2 | dict(num_hidden_layers=3), use_sliding_window=True, sliding_window=6, max_window_layers=1),
         f32)
    make("qwen3", Qwen3Config(**common, head_dim=12, tie_word_embeddings=True, rope_parameters=rope(1e6)), bf16)
    make("qwen3_bias", Qwen3Config(**common | dict(num_key_value_heads=1), head_dim=8, attention_bias=True, use_sliding_window=True,
                                   sliding_window=3, layer_types=["full_attention", "sliding_attention"]), f16)
    make("mixtral", MixtralConfig(**common, head_dim=6, num_local_experts=5, num_experts_per_tok=2), bf16, shard="12KB")
    make("qwen3_moe", Qwen3MoeConfig(**common, head_dim=12, num_local_experts=8, num_experts_per_tok=3, moe_intermediate_size=11), f32)
    make("qwen3_moe_sum", Qwen3MoeConfig(**common | dict(num_hidden_layers=1), head_dim=8, num_local_experts=4, num_experts_per_tok=2,
                                         moe_intermediate_size=14, norm_topk_prob=True, attention_bias=True, use_sliding_window=True,
                                         sliding_window=4), bf16, rewrite=older_experts)
    make("qwen3_moe_balance", Qwen3MoeConfig(**common | dict(num_hidden_layers=1), head_dim=8, num_local_experts=6, num_experts_per_tok=3,
                                             moe_intermediate_size=10), f32, balance=0.5)
    phi3 = dict(hidden_size=24, pad_token_id=None)
    make("phi3", Phi3Config(**common | phi3, sliding_window=5, rope_parameters=rope(1000.0)), bf16, rewrite=phi3_rope)
    make("phi3_full", Phi3Config(**common | phi3 | dict(num_key_value_heads=4), head_dim=8, tie_word_embeddings=True), f16, shard="12KB")
    # Texts of 18 tokens are beyond 12 positions and not beyond 64.
    make("phi3_long", Phi3Config(**common | phi3 | dict(hidden_size=32, num_hidden_layers=3, num_key_value_heads=1), tie_word_embeddings=True,
                                 original_max_position_embeddings=12, rope_parameters=rope(
                                     1000.0, "longrope", partial_rotary_factor=0.75, short_factor=[1.0, 1.25, 1.5], long_factor=[1.08, 2.7, 9.0])),
         bf16, rewrite=long_rope)
    make("phi3_short", Phi3Config(**common | phi3, original_max_position_embeddings=64, rope_parameters=rope(
        500.0, "longrope", factor=4.0, short_factor=[1.0, 1.3, 1.7], long_factor=[1.1, 3.1, 20.0])), f16)
    make("phi3_part", Phi3Config(**common | phi3 | dict(num_key_value_heads=4), head_dim=10, rope_parameters=rope(1000.0, partial_rotary_factor=0.4)),
         f32)
    # Without rope a bias of the keys changes nothing, and its gradient is nothing but rounding.
    make("smollm3", SmolLM3Config(**common | dict(num_hidden_layers=3, pad_token_id=None), head_dim=6, no_rope_layer_interval=2), bf16)
    make("smollm3_list", SmolLM3Config(**common | dict(num_key_value_heads=4, pad_token_id=None), head_dim=8, tie_word_embeddings=False,
                                       no_rope_layers=[0, 0], mlp_bias=True), f16)
    make("qwen2_moe", Qwen2MoeConfig(**common, head_dim=6, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=11,
                                     shared_expert_intermediate_size=17), bf16)
    make("olmo2", Olmo2Config(**common, pad_token_id=None, head_dim=6, rope_parameters=rope(1000.0)), bf16)
    make("olmo2_bias", Olmo2Config(**common | dict(hidden_size=24, num_key_value_heads=4, pad_token_id=None), attention_bias=True,
                                   rope_parameters=rope(500.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                        original_max_position_embeddings=48)), f32)
    gemma = common | dict(hidden_size=24, num_key_value_heads=1, pad_token_id=None)
    make("gemma3", Gemma3TextConfig(**gemma | dict(num_hidden_layers=4), head_dim=12, query_pre_attn_scalar=10, sliding_window=5,
                                    layer_types=["sliding_attention", "full_attention"] * 2,
                                    rope_parameters={"full_attention": rope(1000.0, "linear", factor=2.5), "sliding_attention": rope(50.0)}),
         bf16, rewrite=older_layers)
    make("gemma3_new", Gemma3TextConfig(**gemma | dict(num_hidden_layers=3), head_dim=8, sliding_window=4, attention_bias=True,
                                        tie_word_embeddings=False, layer_types=["sliding_attention"] * 2 + ["full_attention"]), f32)
    gemma2 = gemma | dict(num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=10)
    make("gemma2", Gemma2Config(**gemma2 | dict(num_hidden_layers=3), sliding_window=5, attn_logit_softcapping=1.5, final_logit_softcapping=3.0),
         bf16)
    make("gemma2_full", Gemma2Config(**gemma2, layer_types=["full_attention"] * 2, attention_bias=True, tie_word_embeddings=False,
                                     attn_logit_softcapping=None, final_logit_softcapping=4.0, rope_parameters=rope(500.0)), f32)
    images = Gemma3TextConfig(vocab_size=41, hidden_size=24, intermediate_size=29, num_hidden_layers=2, head_dim=8, max_position_embeddings=64,
                              sliding_window=5, pad_token_id=None, layer_types=["sliding_attention", "full_attention"],
                              rope_parameters={"full_attention": rope(1e6, "linear", factor=8.0), "sliding_attention": rope(1e4)})
    vision = SiglipVisionConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    make("gemma3_images", Gemma3Config(text_config=images, vision_config=vision, mm_tokens_per_image=4), bf16, rewrite=bare_text)
    gemma4 = common | dict(num_key_value_heads=4, num_hidden_layers=3, pad_token_id=None, head_dim=16, global_head_dim=32, sliding_window=5,
                           final_logit_softcapping=30.0, layer_types=["sliding_attention"] * 2 + ["full_attention"], rope_parameters={
                               "full_attention": rope(1000.0, "proportional", partial_rotary_factor=0.25), "sliding_attention": rope(50.0)})
    shared = dict(attention_k_eq_v=True, num_global_key_value_heads=2)
    alone = dict(hidden_size_per_layer_input=0, num_kv_shared_layers=0)
    make("gemma4_dense", Gemma4TextConfig(**gemma4 | shared | alone | dict(num_hidden_layers=6, layer_types=["sliding_attention"] * 5 + ["full_attention"])),
         bf16, double=True, rewrite=gemma4_keys)
    make("gemma4_plain", Gemma4TextConfig(**gemma4 | alone | dict(num_key_value_heads=2)), f32, double=True)
    make("gemma4_moe", Gemma4TextConfig(**gemma4 | shared | alone, enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=11),
         bf16, double=True)
    small = dict(num_hidden_layers=6, layer_types=gemma4["layer_types"] * 2, num_key_value_heads=2, hidden_size_per_layer_input=8,
                 vocab_size_per_layer_input=41, num_kv_shared_layers=3, use_double_wide_mlp=True)
    make("gemma4_small", Gemma4TextConfig(**gemma4 | small), bf16, double=True, rewrite=gemma4_keys)
    vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=4, patch_size=2,
                  position_embedding_size=4)
    make("gemma4_image", Gemma4Config(text_config=gemma4 | shared | alone | dict(use_bidirectional_attention="vision"), vision_config=vision, audio_config=None),
         bf16, double=True, change=fills_up)
    audio = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, subsampling_conv_channels=[4, 2], conv_kernel_size=3, output_proj_dims=8)
    make("gemma4_small_image", Gemma4Config(text_config=gemma4 | small, vision_config=vision | dict(use_clipped_linears=True), audio_config=audio),
         bf16, double=True, change=unread_keys)
    vision = dict(patch_size=2, pooling_kernel_size=1, mm_embed_dim=8, mm_posemb_size=4, output_proj_dims=8)
    make("gemma4_unified", Gemma4UnifiedConfig(text_config=gemma4 | shared, vision_config=vision, audio_config=dict(audio_embed_dim=8)), bf16, double=True,
         change=fills_up)
    images = MistralConfig(**common | dict(hidden_size=24), head_dim=6, sliding_window=None, tie_word_embeddings=False, rope_parameters=rope(1e9))
    vision = PixtralVisionConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    oss = common | dict(hidden_size=24, intermediate_size=13, num_hidden_layers=3, pad_token_id=None)
    make("gpt_oss", GptOssConfig(**oss, head_dim=8, num_local_experts=5, num_experts_per_tok=2, sliding_window=5, rope_parameters=rope(
        1000.0, "yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096)), bf16,
         rewrite=older_rope)
    make("gpt_oss_full", GptOssConfig(**oss | dict(num_hidden_layers=2), head_dim=6, num_local_experts=4, num_experts_per_tok=3,
                                      layer_types=["full_attention"] * 2, attention_bias=False, rope_parameters=rope(500.0)), f32)
    make("gpt_oss_mxfp4", GptOssConfig(**oss | dict(hidden_size=64, intermediate_size=32, num_hidden_layers=1), head_dim=8, num_local_experts=3,
                                       num_experts_per_tok=2, rope_parameters=rope(500.0)), bf16, change=mxfp4)
    make("mistral3_images", Mistral3Config(text_config=images, vision_config=vision, tie_word_embeddings=False), bf16)
    make("qwen3_moe_dense", Qwen3MoeConfig(**common | dict(num_hidden_layers=4), head_dim=8, num_local_experts=4, num_experts_per_tok=2,
                                           moe_intermediate_size=9, decoder_sparse_step=2, mlp_only_layers=[0, 1]), bf16)
    glm = dict(common | dict(num_hidden_layers=3), pad_token_id=None, head_dim=8, num_experts_per_tok=3, moe_intermediate_size=11)
    make("glm4_moe", Glm4MoeConfig(**glm, n_routed_experts=6, n_group=3, topk_group=2, n_shared_experts=2, routed_scaling_factor=1.7,
                                   use_qk_norm=True, attention_bias=True, num_mtp_layers=0, rope_parameters=rope(1000.0, partial_rotary_factor=0.5)), f32)
    make("glm4_moe_free", Glm4MoeConfig(**glm, n_routed_experts=5, norm_topk_prob=False, first_k_dense_replace=2, num_mtp_layers=0,
                                        rope_parameters=rope(1000.0, partial_rotary_factor=0.25)), bf16, rewrite=one_layer_more)
    latent = dict(common | dict(num_hidden_layers=3, num_key_value_heads=4), pad_token_id=None, num_experts_per_tok=3, moe_intermediate_size=11,
                  kv_lora_rank=9, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4)
    yarn = dict(factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=4096)
    make("deepseek_v3", DeepseekV3Config(**latent, n_routed_experts=8, n_group=4, topk_group=2, v_head_dim=7, first_k_dense_replace=1,
                                         rope_parameters=rope(1000.0, "yarn", **yarn, mscale=0.8, mscale_all_dim=1.2)), bf16,
         rewrite=lambda folder: deepseek_keys(folder, False))
    vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, patch_size=2, pos_emb_height=4, pos_emb_width=4, pos_emb_time=1)
    make("kimi_k25_images", Kimi_K25Config(
        text_config=DeepseekV3Config(**latent, n_routed_experts=6, n_group=1, topk_group=1, v_head_dim=6, first_k_dense_replace=1, routed_scaling_factor=2.827,
                                     rope_parameters=rope(5e4, "yarn", **yarn, mscale=1.0, mscale_all_dim=1.0)).to_dict(),
        vision_config=vision, projection_hidden_size=8, tie_word_embeddings=False), bf16, rewrite=kimi_keys)
    make("deepseek_v3_half", DeepseekV3Config(**latent | dict(q_lora_rank=None), n_routed_experts=5, n_group=1, topk_group=1, v_head_dim=10,
                                              n_shared_experts=2, first_k_dense_replace=0, norm_topk_prob=False, attention_bias=True,
                                              rope_interleave=False, rope_parameters=rope(500.0)), f32)
    make("deepseek_v2", DeepseekV2Config(**latent | dict(q_lora_rank=None, kv_lora_rank=12), n_routed_experts=6, n_group=3, topk_group=2, v_head_dim=5,
                                         topk_method="group_limited_greedy", routed_scaling_factor=4.0, first_k_dense_replace=2,
                                         rope_parameters=rope(1000.0, "yarn", **yarn, mscale=0.707, mscale_all_dim=0.707)), bf16,
         rewrite=lambda folder: deepseek_keys(folder, True))
    make("deepseek_v2_greedy", DeepseekV2Config(**latent | dict(kv_lora_rank=8), n_routed_experts=5, v_head_dim=8, n_shared_experts=1, attention_bias=True,
                                                rope_parameters=rope(500.0)), f32)
    make("dots1", Dots1Config(**common | dict(num_hidden_layers=3, pad_token_id=None), head_dim=8, n_routed_experts=6, n_group=3, topk_group=2, n_shared_experts=2,
                              num_experts_per_tok=3, moe_intermediate_size=11, first_k_dense_replace=1, routed_scaling_factor=2.5, attention_bias=True,
                              rope_parameters=rope(1000.0)), bf16)
    make("dots1_window", Dots1Config(**common | dict(pad_token_id=None), head_dim=8, n_routed_experts=5, n_shared_experts=1, num_experts_per_tok=2,
                                     moe_intermediate_size=11, norm_topk_prob=True, sliding_window=5, max_window_layers=1, rope_parameters=rope(1000.0)), f32)
    solar = {key: common[key] for key in common if key != "intermediate_size"} | dict(pad_token_id=None)
    make("solar_open", SolarOpenConfig(**solar, head_dim=8, n_routed_experts=6, n_shared_experts=1, num_experts_per_tok=3, moe_intermediate_size=11,
                                       rope_parameters=rope(1000.0, "yarn", factor=2.0, original_max_position_embeddings=32)), bf16)
    make("solar_open_groups", SolarOpenConfig(**solar, head_dim=8, n_routed_experts=6, n_group=3, topk_group=2, n_shared_experts=2, num_experts_per_tok=2,
                                            moe_intermediate_size=11, norm_topk_prob=False, routed_scaling_factor=1.7, attention_bias=True,
                                            tie_word_embeddings=True, rope_parameters=rope(500.0)), f32)
    make("glm4_moe_lite", Glm4MoeLiteConfig(**latent, n_routed_experts=6, v_head_dim=10, mlp_layer_types=["dense", "dense", "sparse"],
                                            rope_parameters=rope(1000.0)), f32)
    indexed = latent | dict(index_topk=60, index_n_heads=3, index_head_dim=8)
    make("deepseek_v32", DeepseekV32Config(**indexed, n_routed_experts=8, n_group=4, topk_group=2, v_head_dim=7, first_k_dense_replace=1,
                                           rope_parameters=rope(1000.0, "yarn", **yarn, mscale=0.8, mscale_all_dim=1.2)), bf16,
         rewrite=lambda folder: deepseek_keys(folder, False))
    make("glm_moe_dsa", GlmMoeDsaConfig(**indexed | dict(num_hidden_layers=4, index_topk=52), n_routed_experts=4, v_head_dim=10,
                                        mlp_layer_types=["dense", "dense", "sparse", "sparse"], indexer_types=["full", "shared", "shared", "full"],
                                        attention_bias=True, rope_parameters=rope(1000.0)), f32)
    # Fewer keys than there are.
    few = indexed | dict(index_topk=7)
    make("deepseek_v32_few", DeepseekV32Config(**few, n_routed_experts=6, n_group=3, topk_group=2, v_head_dim=10, first_k_dense_replace=1, rope_parameters=rope(1000.0)), bf16, T=37, seed=13)
    make("glm_moe_dsa_few", GlmMoeDsaConfig(**few | dict(num_hidden_layers=5, index_n_heads=2), n_routed_experts=4, v_head_dim=7,
                                            mlp_layer_types=["dense", "dense", "sparse", "sparse", "sparse"],
                                            indexer_types=["full", "shared", "shared", "full", "shared"], rope_parameters=rope(1000.0, "yarn", **yarn)), f32, T=37, seed=12)
    minimax = common | dict(intermediate_size=11, pad_token_id=None, num_experts_per_tok=3)
    make("minimax_m2", MiniMaxM2Config(**minimax, head_dim=8, num_local_experts=6, rope_parameters=rope(1000.0, partial_rotary_factor=0.5)), bf16)
    make("minimax_m2_old", MiniMaxM2Config(**minimax | dict(num_key_value_heads=4, num_hidden_layers=3), head_dim=6, num_local_experts=4,
                                           rope_parameters=rope(500.0, partial_rotary_factor=2 / 3)), f32, rewrite=minimax_keys)
    olmo3 = common | dict(hidden_size=24, pad_token_id=None, sliding_window=5)
    make("olmo3", Olmo3Config(**olmo3 | dict(num_hidden_layers=4), layer_types=["sliding_attention", "full_attention"] * 2,
                              rope_parameters={"full_attention": rope(1000.0, "yarn", **yarn), "sliding_attention": rope(200.0)}), bf16)
    make("olmo3_old", Olmo3Config(**olmo3 | dict(num_hidden_layers=5, num_key_value_heads=4), attention_bias=True,
                                  rope_parameters={"full_attention": rope(5e5, "yarn", **yarn | dict(factor=8.0, attention_factor=1.2))}), f32,
         rewrite=olmo_rope)
    make("gemma", GemmaConfig(**common | dict(num_key_value_heads=1, pad_token_id=None), head_dim=8, rope_parameters=rope(1000.0)), bf16,
         rewrite=first_gemma)
    make("gemma_untied", GemmaConfig(**common | dict(hidden_size=24, num_hidden_layers=3, pad_token_id=None), head_dim=6, attention_bias=True,
                                     tie_word_embeddings=False, rope_parameters=rope(500.0, "linear", factor=2.5)), f32)
    granite = dict(hidden_size=24, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.4, logits_scaling=8.0, pad_token_id=None)
    make("granite", GraniteConfig(**common | granite, tie_word_embeddings=True, rope_parameters=rope(1000.0)), bf16)
    make("granite_bias", GraniteConfig(**common | granite | dict(num_hidden_layers=3, logits_scaling=0.7, residual_multiplier=1.3), attention_bias=True,
                                       mlp_bias=True, rope_parameters=rope(500.0)), f32)
    granite = common | granite | dict(num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=31, layer_types=["full_attention"] * 2, mamba_n_heads=48)
    make("granitemoehybrid", GraniteMoeHybridConfig(**granite, position_embedding_type="rope", tie_word_embeddings=True, rope_parameters=rope(1000.0)), bf16,
         rewrite=granite_keys)
    make("granitemoehybrid_nope", GraniteMoeHybridConfig(**granite | dict(num_key_value_heads=1, residual_multiplier=1.3)), f32)
    mamba = granite | dict(num_hidden_layers=4, embedding_multiplier=1.5, residual_multiplier=0.7, mamba_n_heads=6, mamba_d_head=8, mamba_d_state=16, layer_types=["linear_attention"] * 2 + ["full_attention", "linear_attention"])
    make("granitemoehybrid_mamba", GraniteMoeHybridConfig(**mamba, tie_word_embeddings=True), bf16, double=True, rewrite=mamba_keys)
    make("granitemoehybrid_mamba_rope", GraniteMoeHybridConfig(**mamba | dict(num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "linear_attention"], mamba_n_heads=3, mamba_d_head=24, mamba_expand=3, mamba_d_state=24, mamba_d_conv=3),
                                                                position_embedding_type="rope", attention_bias=True, mamba_conv_bias=False, rope_parameters=rope(1000.0)), f32, double=True, seed=13)
    make("granitemoehybrid_moe", GraniteMoeHybridConfig(**mamba | dict(num_local_experts=6, num_experts_per_tok=3, intermediate_size=11)), bf16, double=True)
    make("granitemoehybrid_groups", GraniteMoeHybridConfig(**mamba | dict(mamba_n_groups=3)), f32, double=True)
    nemotron = common | dict(pad_token_id=None, head_dim=8, mamba_num_heads=6, mamba_head_dim=8, n_groups=3, ssm_state_size=16, n_routed_experts=6, num_experts_per_tok=3,
                             moe_intermediate_size=11, moe_shared_expert_intermediate_size=19)
    del nemotron["num_hidden_layers"]
    make("nemotron_h", NemotronHConfig(**nemotron, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]), bf16, double=True, rewrite=nemotron_keys)
    make("nemotron_h_moe", NemotronHConfig(**nemotron, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], routed_scaling_factor=2.5), bf16, double=True,
         rewrite=names_in_memory)
    make("nemotron_h_groups", NemotronHConfig(**nemotron | dict(num_key_value_heads=1, n_groups=2, conv_kernel=3), layers_block_type=["moe", "linear_attention", "mlp", "linear_attention"],
                                              n_group=3, topk_group=2, norm_topk_prob=False, mlp_bias=True, use_conv_bias=False, time_step_min=0.3), f32,
         double=True)
    make("nemotron_h_latent", NemotronHConfig(**nemotron, layers_block_type=["full_attention", "moe", "linear_attention", "moe"], moe_latent_size=14, mlp_bias=True), bf16, double=True)
    v4 = dict(vocab_size=41, hidden_size=16, moe_intermediate_size=11, num_hidden_layers=3, num_attention_heads=4, head_dim=10, q_lora_rank=12, qk_rope_head_dim=6, n_routed_experts=6,
              num_experts_per_tok=3, max_position_embeddings=64, compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, hc_sinkhorn_iters=5, sliding_window=6,
              o_groups=2, o_lora_rank=7, index_n_heads=3, index_head_dim=8, index_topk=3, bos_token_id=None, eos_token_id=None)
    make("deepseek_v4", DeepseekV4Config(**v4, layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"], mlp_layer_types=["hash_moe", "moe", "moe"],
                                         rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=1.0)), bf16, T=37, double=True)
    make("deepseek_v4_all", DeepseekV4Config(**v4 | dict(hc_mult=2, index_topk=60, num_attention_heads=3, o_groups=3, hidden_size=20, hc_eps=1e-3), layer_types=["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"], mlp_layer_types=["hash_moe", "hash_moe", "moe"]), f32, T=37,
         double=True, seed=22, rewrite=names_of_deepseek4)
    llama4 = common | dict(pad_token_id=None, head_dim=8, intermediate_size=11, intermediate_size_mlp=31, num_local_experts=5)
    scout = rope(1000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=48)
    make("llama4", Llama4TextConfig(**llama4 | dict(num_hidden_layers=4), interleave_moe_layer_step=2, no_rope_layer_interval=4, attention_chunk_size=5, floor_scale=3,
                                    attn_scale=0.6, rope_parameters=scout), bf16, rewrite=llama4_keys)
    make("llama4_each", Llama4TextConfig(**llama4 | dict(num_key_value_heads=1), num_experts_per_tok=2, use_qk_norm=False, attention_chunk_size=None, no_rope_layers=[1, 0],
                                         attn_temperature_tuning=False, tie_word_embeddings=True, rope_parameters=rope(500.0)), f32)
    make("llama4_bias", Llama4TextConfig(**llama4, attention_bias=True, no_rope_layers=[1, 1], attention_chunk_size=16, moe_layers=[1], rope_parameters=rope(500.0, "linear", factor=2.5)), f16)
    vision = Llama4VisionConfig(hidden_size=8, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=4, patch_size=2, vision_output_dim=8,
                                projector_input_dim=8, projector_output_dim=8)
    make("llama4_images", Llama4Config(text_config=Llama4TextConfig(**llama4, rope_parameters=scout).to_dict(), vision_config=vision.to_dict(), image_token_index=0,
                                       boi_token_index=1, eoi_token_index=2), bf16, rewrite=llama4_keys)
    make("olmoe", OlmoeConfig(**common | dict(hidden_size=24, intermediate_size=11, pad_token_id=None), num_experts=6, num_experts_per_tok=3,
                              rope_parameters=rope(1000.0)), bf16)
    make("olmoe_sum", OlmoeConfig(**common | dict(hidden_size=24, intermediate_size=13, num_key_value_heads=4, pad_token_id=None), num_experts=4,
                                  num_experts_per_tok=2, norm_topk_prob=True, attention_bias=True, rope_parameters=rope(500.0)), f32)
    make("seed_oss", SeedOssConfig(**common | dict(pad_token_id=None), head_dim=6, rope_parameters=rope(1000.0)), bf16)
    make("seed_oss_out", SeedOssConfig(**common | dict(num_key_value_heads=1, pad_token_id=None), head_dim=8, attention_bias=False, mlp_bias=True,
                                       attention_out_bias=True, tie_word_embeddings=True, rope_parameters=rope(500.0)), f32)
    make("glm", GlmConfig(**common | dict(pad_token_id=None), head_dim=8, rope_parameters=rope(1000.0, partial_rotary_factor=0.5)), bf16, rewrite=glm_rope)
    make("glm4", Glm4Config(**common | dict(pad_token_id=None), head_dim=12, attention_bias=False,
                            rope_parameters=rope(1000.0, partial_rotary_factor=0.5)), bf16, rewrite=glm_rope)
    make("glm4_yarn", Glm4Config(**common | dict(num_hidden_layers=3, num_key_value_heads=1, pad_token_id=None), head_dim=8, tie_word_embeddings=True,
                                 rope_parameters=rope(50.0, "yarn", factor=4.0, original_max_position_embeddings=24, partial_rotary_factor=1.0)), f32)
    make("ernie4_5", Ernie4_5Config(**common | dict(pad_token_id=None), head_dim=8, rope_parameters=rope(1000.0)), bf16)
    make("ernie4_5_bias", Ernie4_5Config(**common | dict(num_key_value_heads=1, pad_token_id=None), head_dim=6, use_bias=True, tie_word_embeddings=False,
                                         rope_parameters=rope(500.0, "linear", factor=2.5)), f32)
    ernie = common | dict(hidden_size=24, num_hidden_layers=3, pad_token_id=None, moe_num_experts=6, moe_intermediate_size=11)
    make("ernie4_5_moe", Ernie4_5_MoeConfig(**ernie, moe_k=3, rope_parameters=rope(1000.0)), bf16, rewrite=ernie_keys)
    make("ernie4_5_moe_each", Ernie4_5_MoeConfig(**ernie | dict(num_hidden_layers=4, num_key_value_heads=1, moe_num_experts=4), head_dim=8, moe_k=2, moe_num_shared_experts=0,
                                                 moe_layer_start_index=0, moe_layer_interval=2, tie_word_embeddings=False, rope_parameters=rope(500.0, "linear", factor=2.5)), f32,
         rewrite=names_in_memory)
    hy = common | dict(num_hidden_layers=3, pad_token_id=None, head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=11)
    make("hy_v3", HYV3Config(**hy, rope_parameters=rope(1000.0)), bf16, rewrite=hy_keys)
    make("hy_v3_bias", HYV3Config(**hy | dict(num_hidden_layers=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2), num_shared_experts=2, attention_bias=True,
                                  mlp_bias=True, router_scaling_factor=1.3, mlp_layer_types=["sparse"] * 2, tie_word_embeddings=True, rope_parameters=rope(500.0)), f32, rewrite=names_in_memory)
    hunyuan = common | dict(pad_token_id=None, head_dim=8)
    alpha = rope(100.0, "dynamic", alpha=50.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=0.0)
    make("hunyuan_v1_dense", HunYuanDenseV1Config(**hunyuan, tie_word_embeddings=True, rope_parameters=alpha), bf16, rewrite=older_rope)
    make("hunyuan_v1_dense_bias", HunYuanDenseV1Config(**hunyuan | dict(num_key_value_heads=1, head_dim=12), attention_bias=True, rope_parameters=rope(500.0)), f32)
    make("hunyuan_v1_moe", HunYuanMoEV1Config(**hunyuan | dict(intermediate_size=13), num_experts=6, moe_topk=[3, 3], rope_parameters=alpha), bf16, rewrite=hunyuan_keys)
    cohere = common | dict(hidden_size=24, pad_token_id=None)
    make("cohere", CohereConfig(**cohere | dict(num_key_value_heads=4), rope_parameters=rope(1000.0)), bf16, rewrite=older_rope)
    make("cohere_bias", CohereConfig(**cohere, attention_bias=True, logit_scale=0.25, tie_word_embeddings=False, rope_parameters=rope(500.0, "linear", factor=2.5)), f32)
    make("cohere2", Cohere2Config(**cohere | dict(num_hidden_layers=4), logit_scale=0.25, sliding_window=5, rope_parameters=rope(1000.0)), bf16, rewrite=cohere_keys)
    make("exaone4", Exaone4Config(**common | dict(pad_token_id=None), head_dim=12, sliding_window=None, layer_types=["full_attention"] * 2, tie_word_embeddings=True,
                                  rope_parameters=rope(500.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                       original_max_position_embeddings=48)), bf16)
    growing = rope(1000.0, "yarn", factor=16.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4,
                   llama_4_scaling_beta=0.6)
    make("ministral3", Ministral3Config(**common | dict(pad_token_id=None), head_dim=6, rope_parameters=growing), bf16)
    make("ministral3_images", Mistral3Config(
        text_config=Ministral3Config(**common | dict(num_key_value_heads=1, pad_token_id=None), head_dim=8, rope_parameters=growing).to_dict(),
        vision_config=PixtralVisionConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=4, patch_size=2).to_dict(),
        image_token_index=0, tie_word_embeddings=False), bf16)
    mistral4 = latent | dict(num_hidden_layers=2, n_routed_experts=5, v_head_dim=7, rope_parameters=growing | dict(mscale_all_dim=1.5, rope_theta=500.0))
    make("mistral4", Mistral4Config(**mistral4, first_k_dense_replace=1), bf16, rewrite=mistral4_keys)
    make("mistral4_images", Mistral3Config(
        text_config=Mistral4Config(**mistral4 | dict(num_hidden_layers=1, q_lora_rank=None, n_shared_experts=2), attention_bias=True, norm_topk_prob=False, routed_scaling_factor=1.7,
                                   rope_interleave=False).to_dict(),
        vision_config=PixtralVisionConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=4, patch_size=2).to_dict(),
        image_token_index=0, tie_word_embeddings=False), f32)
    mimo = common | dict(hidden_size=16, intermediate_size=21, pad_token_id=None, head_dim=12, v_head_dim=8, sliding_window=5, n_routed_experts=5, num_experts_per_tok=2,
                         moe_intermediate_size=9)
    make("mimo_v2_flash", MiMoV2FlashConfig(**mimo), bf16, rewrite=mimo_keys)
    turned = dict(partial_rotary_factor=0.5)
    make("mimo_v2_flash_bias", MiMoV2FlashConfig(**mimo | dict(num_key_value_heads=1, v_head_dim=12, n_routed_experts=4), n_group=2, topk_group=1,
                                                 norm_topk_prob=False, routed_scaling_factor=1.7, attention_bias=True, attention_value_scale=None, tie_word_embeddings=True,
                                                 layer_types=["sliding_attention", "full_attention"], mlp_layer_types=["sparse"] * 2,
                                                 rope_parameters={"full_attention": rope(500.0, **turned), "sliding_attention": rope(50.0, **turned)}), f32)
    make("bamba", BambaConfig(**common | dict(hidden_size=16, intermediate_size=21, pad_token_id=None, head_dim=8), attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=2,
                              mamba_d_state=8, mlp_bias=True, rope_parameters=rope(1000.0)), bf16, double=True, rewrite=older_rope)
    lfm = common | dict(hidden_size=24, pad_token_id=None, rope_parameters=rope(1000.0))
    make("lfm2", Lfm2Config(**lfm | dict(num_hidden_layers=3), layer_types=["conv", "full_attention", "conv"], block_multiple_of=8), bf16, rewrite=lfm_keys)
    make("lfm2_moe", Lfm2MoeConfig(**lfm | dict(num_key_value_heads=1), layer_types=["conv", "full_attention"], conv_L_cache=4, num_dense_layers=1, num_experts=4, num_experts_per_tok=2,
                                   moe_intermediate_size=7, routed_scaling_factor=1.7, tie_word_embeddings=False), f32, change=small_scores)
    afmoe = common | dict(hidden_size=16, intermediate_size=21, pad_token_id=None, head_dim=8, num_experts_per_tok=2, moe_intermediate_size=9)
    make("afmoe", AfmoeConfig(**afmoe, sliding_window=5, global_attn_every_n_layers=2, num_experts=4, num_shared_experts=1, route_scale=2.826, mup_enabled=True,
                              rope_parameters=rope(1000.0)), bf16, rewrite=afmoe_keys)
    make("afmoe_bias", AfmoeConfig(**afmoe | dict(num_key_value_heads=1, head_dim=6), sliding_window=4, layer_types=["sliding_attention"] * 2, num_experts=3, num_dense_layers=0, attention_bias=True,
                                   tie_word_embeddings=True, rope_parameters=rope(500.0, "linear", factor=2.5)), f32)
    hybrid = OlmoHybridConfig(**common | dict(hidden_size=16, intermediate_size=21, pad_token_id=None), layer_types=["linear_attention", "full_attention"], linear_num_key_heads=1,
                              linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": None})
    make("olmo_hybrid", hybrid, bf16, double=True, rewrite=lambda folder: hybrid_keys(folder, hybrid))
    make("olmo_hybrid_rope", OlmoHybridConfig(**common | dict(hidden_size=16, intermediate_size=21, num_hidden_layers=3, num_key_value_heads=1, pad_token_id=None), linear_num_key_heads=2,
                                              linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=3, linear_allow_neg_eigval=False,
                                              attention_bias=True, tie_word_embeddings=True, rope_parameters=rope(500.0)), f32, double=True)
    falcon = common | dict(hidden_size=16, intermediate_size=21, pad_token_id=None)
    make("falcon_h1", FalconH1Config(**falcon | dict(head_dim=8), mamba_n_heads=2, mamba_d_ssm=16, mamba_d_head=8, mamba_d_state=8, embedding_multiplier=5.6, lm_head_multiplier=0.3,
                                     mlp_multipliers=[0.9, 0.4], key_multiplier=0.4, attention_in_multiplier=1.3, attention_out_multiplier=0.9, ssm_in_multiplier=1.25, ssm_out_multiplier=0.6,
                                     ssm_multipliers=[0.7, 0.5, 0.8, 0.6, 0.9], rope_parameters=rope(1000.0)), bf16, double=True, rewrite=falcon_keys)
    make("falcon_h1_norm", FalconH1Config(**falcon | dict(num_hidden_layers=1), mamba_n_heads=4, mamba_d_ssm=None, mamba_d_head="auto", mamba_n_groups=2, mamba_d_state=8, mamba_d_conv=3,
                                          mamba_conv_bias=False, mamba_rms_norm=True, mamba_norm_before_gate=False, attention_bias=True, mlp_bias=True, tie_word_embeddings=True), f32, double=True)
    make("falcon_h1_norm_first", FalconH1Config(**falcon | dict(hidden_size=8, intermediate_size=11, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1), mamba_n_heads=2, mamba_d_ssm=16,
                                                mamba_d_head=8, mamba_d_state=8, mamba_d_conv=2, mamba_rms_norm=True, tie_word_embeddings=True, lm_head_multiplier=0.5), f32, double=True)
    kimi = dict(vocab_size=41, hidden_size=16, intermediate_size=21, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None, bos_token_id=1, eos_token_id=2,
                kv_lora_rank=10, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5, moe_intermediate_size=9, linear_num_heads=2, linear_head_dim=8, num_experts_per_tok=2)
    make("kimi_linear", KimiLinearConfig(**kimi, num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], num_local_experts=4), bf16, double=True,
         rewrite=kimi_linear_keys)
    make("kimi_linear_groups", KimiLinearConfig(**kimi | dict(linear_num_heads=1, linear_head_dim=16, num_attention_heads=1, num_key_value_heads=1), num_hidden_layers=2, layer_types=["full_attention", "linear_attention"],
                                                num_local_experts=4, n_group=2, topk_group=1, n_shared_experts=2, q_lora_rank=6, attention_bias=True, linear_conv_kernel_dim=3, first_k_dense_replace=0,
                                                norm_topk_prob=False, routed_scaling_factor=1.5), f32, double=True)
    make("exaone_moe", ExaoneMoeConfig(**common | dict(num_hidden_layers=4, pad_token_id=None), head_dim=8, sliding_window=5, rope_parameters=rope(1000.0),
                                       layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"], num_experts=4,
                                       num_experts_per_tok=2, moe_intermediate_size=11, mlp_layer_types=["dense", "dense", "sparse", "sparse"],
                                       n_group=2, topk_group=1, num_shared_experts=2), bf16)
    make("exaone4_window", Exaone4Config(**common | dict(num_hidden_layers=4, pad_token_id=None), head_dim=8, sliding_window=5, rope_parameters=rope(1000.0),
                                         sliding_window_pattern="LLLG", layer_types=["sliding_attention"] * 3 + ["full_attention"]), f32)
    neox = {key: common[key] for key in common if key != "num_key_value_heads"} | dict(hidden_size=32, pad_token_id=None)
    make("gpt_neox", GPTNeoXConfig(**neox, rope_parameters=rope(1000.0, partial_rotary_factor=0.25)), f16, rewrite=first_neox)
    make("gpt_neox_serial", GPTNeoXConfig(**neox | dict(hidden_size=24), use_parallel_residual=False, attention_bias=False, hidden_act="gelu_fast",
                                          tie_word_embeddings=True, rope_parameters=rope(500.0, "linear", factor=2.5, partial_rotary_factor=1.0)), f32)
    opt = dict(vocab_size=41, hidden_size=20, ffn_dim=29, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=24, pad_token_id=None,
               bos_token_id=1, eos_token_id=2)
    make("opt", OPTConfig(**opt), f16, rewrite=first_opt)
    make("opt_gelu", OPTConfig(**opt | dict(hidden_size=21, num_attention_heads=3), enable_bias=False, activation_function="gelu", tie_word_embeddings=False), f32)
    make("starcoder2", Starcoder2Config(**common | dict(hidden_size=24), rope_parameters=rope(1000.0)), bf16)
    make("starcoder2_window", Starcoder2Config(**common | dict(hidden_size=24, num_key_value_heads=1), sliding_window=5, use_bias=False, hidden_act="gelu",
                                               tie_word_embeddings=False, rope_parameters=rope(500.0, "yarn", factor=4.0, original_max_position_embeddings=24)), f32)
    make("stablelm", StableLmConfig(**common | dict(hidden_size=32, pad_token_id=None), use_qkv_bias=True,
                                    rope_parameters=rope(1000.0, partial_rotary_factor=0.25)), bf16, rewrite=glm_rope)
    make("stablelm_parallel", StableLmConfig(**common | dict(hidden_size=32, num_key_value_heads=4, pad_token_id=None), use_parallel_residual=True,
                                             tie_word_embeddings=True, rope_parameters=rope(500.0, partial_rotary_factor=0.5)), f32)
    axes = dict(common | dict(hidden_size=24), pad_token_id=None, rope_parameters=rope(1000.0, mrope_section=[1, 1, 1]))
    tokens = dict(image_token_id=40, video_token_id=39, vision_start_token_id=38, vision_end_token_id=37)
    vision = dict(depth=1, embed_dim=8, hidden_size=24, num_heads=2, mlp_ratio=1)
    make("qwen2_vl_images", Qwen2VLConfig(text_config=axes, vision_config=vision, tie_word_embeddings=True, **tokens), bf16)
    vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=24, fullatt_block_indexes=[0])
    make("qwen2_5_vl_images", Qwen2_5_VLConfig(text_config=axes | dict(num_hidden_layers=3), vision_config=vision, **tokens), bf16, rewrite=flat_text)
    axes = axes | dict(head_dim=8, rope_parameters=rope(1000.0, mrope_section=[2, 1, 1], mrope_interleaved=True))
    vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=24, deepstack_visual_indexes=[0], num_position_embeddings=4)
    make("qwen3_vl_images", Qwen3VLConfig(text_config=axes, vision_config=vision, tie_word_embeddings=False, **tokens), bf16)
    mixture = axes | dict(num_hidden_layers=3, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=11, mlp_only_layers=[0])
    make("qwen3_vl_moe_images", Qwen3VLMoeConfig(text_config=mixture, vision_config=vision, **tokens), bf16, rewrite=turned_experts)
    make("qwen3_vl_moe_saved_images", Qwen3VLMoeConfig(text_config=mixture | dict(num_hidden_layers=1, mlp_only_layers=[]), vision_config=vision, tie_word_embeddings=True, **tokens), f32)
    linear = dict(common | dict(hidden_size=24, num_hidden_layers=4), pad_token_id=None, head_dim=8, linear_conv_kernel_dim=4, linear_key_head_dim=8,
                  linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4)
    more = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=11, shared_expert_intermediate_size=13)
    turned = rope(1000.0, partial_rotary_factor=0.25)
    # In double: states go through more rows than fp32 rounds alike in two orders.
    make("qwen3_5", Qwen3_5TextConfig(**linear, rope_parameters=turned), bf16, double=True)
    make("qwen3_5_tied", Qwen3_5TextConfig(**linear | dict(num_hidden_layers=5, linear_conv_kernel_dim=3, linear_num_key_heads=1, linear_num_value_heads=3,
                                                           num_key_value_heads=1, linear_value_head_dim=8), full_attention_interval=3, tie_word_embeddings=True,
                                           rope_parameters=rope(500.0, partial_rotary_factor=0.5)), f32, double=True, seed=13)
    make("qwen3_5_yarn", Qwen3_5TextConfig(**linear | dict(num_hidden_layers=2, head_dim=16), full_attention_interval=2,
                                           rope_parameters=rope(500.0, "yarn", factor=4.0, original_max_position_embeddings=24, partial_rotary_factor=0.5,
                                                                mrope_section=[2, 1, 1], mrope_interleaved=True)), bf16, double=True)
    make("qwen3_5_moe", Qwen3_5MoeTextConfig(**{key: linear[key] for key in linear if key != "intermediate_size"}, **more, rope_parameters=turned), f32, double=True)
    make("qwen3_next", Qwen3NextConfig(**linear, **more, rope_parameters=turned), bf16, double=True, rewrite=next_keys)
    make("qwen3_next_dense", Qwen3NextConfig(**linear | dict(num_hidden_layers=5, linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=16, linear_value_head_dim=8),
                                             **more, full_attention_interval=2, decoder_sparse_step=2, mlp_only_layers=[0, 1], norm_topk_prob=False,
                                             rope_parameters=rope(500.0, partial_rotary_factor=1.0)), f32, double=True)
    vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=24, num_position_embeddings=4)
    make("qwen3_5_images", Qwen3_5Config(text_config=linear | dict(rope_parameters=turned), vision_config=vision, tie_word_embeddings=True, **tokens), bf16, double=True,
         rewrite=images_keys)
    linear.pop("intermediate_size")
    make("qwen3_5_moe_images", Qwen3_5MoeConfig(text_config=linear | more | dict(rope_parameters=turned), vision_config=vision, **tokens), bf16, double=True, rewrite=images_keys)
