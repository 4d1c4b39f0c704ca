#!/usr/bin/env python3
"""Makes tests/vectors/torch_*.bin: small models trained by plain PyTorch in fp32, written from the formulas.

Layout of a file, little-endian: int32 header of 16 (magic 0x53505754, family 0 gpt2 / 1 llama, vocab, width, layers, heads,
kv heads, head size, MLP width, positions, T, micro-batch B, accumulation A, steps, tied, tensors); then per tensor int32 name
length, name, int32 count, fp32 weights, fp32 gradients of the first step; then int32 tokens and targets (steps, A, B, T); fp32
logits (2, vocab) of the first sequence: of its last token, and of the last of its first T / 3 tokens; fp64 losses (steps); fp64
gradient norms before clipping (steps); fp64 sums of squares of the final weights (tensors). All before the first step but the last
three. The sums leave out the key third of GPT-2's packed bias: softmax does not change when all keys shift, so its gradient is 0
(1e-18 in fp64) and Adam makes of the rounding noise of about 1e-9 steps that no two implementations share; PyTorch's own fp32 and
fp64 runs differ by 6e-4 there, and by less than 1e-6 in the other two thirds.
"""
import math, os, struct
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


def gpt2_params(c):
    C, I = c["width"], c["mlp"]
    p = {"wte.weight": (c["vocab"], C), "wpe.weight": (c["positions"], C)}
    for l in range(c["layers"]):
        h = f"h.{l}."
        p |= {h + "ln_1.weight": (C,), h + "ln_1.bias": (C,), h + "attn.c_attn.weight": (C, 3 * C), h + "attn.c_attn.bias": (3 * C,),
              h + "attn.c_proj.weight": (C, C), h + "attn.c_proj.bias": (C,), h + "ln_2.weight": (C,), h + "ln_2.bias": (C,),
              h + "mlp.c_fc.weight": (C, I), h + "mlp.c_fc.bias": (I,), h + "mlp.c_proj.weight": (I, C), h + "mlp.c_proj.bias": (C,)}
    return p | {"ln_f.weight": (C,), "ln_f.bias": (C,)}


def llama_params(c):
    H, I, q, kv = c["width"], c["mlp"], c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
    p = {"model.embed_tokens.weight": (c["vocab"], H)}
    for l in range(c["layers"]):
        h = f"model.layers.{l}."
        p |= {h + "input_layernorm.weight": (H,), h + "self_attn.q_proj.weight": (q, H), h + "self_attn.k_proj.weight": (kv, H),
              h + "self_attn.v_proj.weight": (kv, H), h + "self_attn.o_proj.weight": (H, q),
              h + "post_attention_layernorm.weight": (H,), h + "mlp.gate_proj.weight": (I, H), h + "mlp.up_proj.weight": (I, H),
              h + "mlp.down_proj.weight": (H, I)}
    p["model.norm.weight"] = (H,)
    if not c["tied"]:
        p["lm_head.weight"] = (c["vocab"], H)
    return p


def attend(q, k, v):
    T, d = q.shape[-2], q.shape[-1]
    s = q @ k.transpose(-1, -2) / math.sqrt(d)
    s = s.masked_fill(torch.triu(torch.ones(T, T, dtype=torch.bool), 1), float("-inf"))
    return torch.softmax(s, -1) @ v


def gpt2(p, c, x):
    B, T = x.shape
    C, n = c["width"], c["heads"]
    h = p["wte.weight"][x] + p["wpe.weight"][:T]
    for l in range(c["layers"]):
        g = lambda k: p[f"h.{l}.{k}"]
        a = F.layer_norm(h, (C,), g("ln_1.weight"), g("ln_1.bias"), 1e-5)
        q, k, v = (a @ g("attn.c_attn.weight") + g("attn.c_attn.bias")).split(C, -1)
        q, k, v = (t.view(B, T, n, C // n).transpose(1, 2) for t in (q, k, v))
        o = attend(q, k, v).transpose(1, 2).reshape(B, T, C)
        h = h + o @ g("attn.c_proj.weight") + g("attn.c_proj.bias")
        m = F.layer_norm(h, (C,), g("ln_2.weight"), g("ln_2.bias"), 1e-5)
        m = m @ g("mlp.c_fc.weight") + g("mlp.c_fc.bias")
        m = 0.5 * m * (1 + torch.tanh(math.sqrt(2 / math.pi) * (m + 0.044715 * m ** 3)))
        h = h + m @ g("mlp.c_proj.weight") + g("mlp.c_proj.bias")
    return F.layer_norm(h, (C,), p["ln_f.weight"], p["ln_f.bias"], 1e-5) @ p["wte.weight"].T


def rms(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def rotate(x, T, d):
    f = 1.0 / 10000.0 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    a = torch.outer(torch.arange(T, dtype=torch.float32), f.float()).double()
    cos, sin = a.cos().float(), a.sin().float()
    x1, x2 = x[..., : d // 2], x[..., d // 2:]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def llama(p, c, x):
    B, T = x.shape
    n, kv, d = c["heads"], c["kv_heads"], c["head_dim"]
    h = p["model.embed_tokens.weight"][x]
    for l in range(c["layers"]):
        g = lambda k: p[f"model.layers.{l}.{k}.weight"]
        a = rms(h, g("input_layernorm"))
        q = rotate((a @ g("self_attn.q_proj").T).view(B, T, n, d).transpose(1, 2), T, d)
        k = rotate((a @ g("self_attn.k_proj").T).view(B, T, kv, d).transpose(1, 2), T, d)
        v = (a @ g("self_attn.v_proj").T).view(B, T, kv, d).transpose(1, 2)
        k, v = (t.repeat_interleave(n // kv, 1) for t in (k, v))
        h = h + attend(q, k, v).transpose(1, 2).reshape(B, T, n * d) @ g("self_attn.o_proj").T
        a = rms(h, g("post_attention_layernorm"))
        h = h + (F.silu(a @ g("mlp.gate_proj").T) * (a @ g("mlp.up_proj").T)) @ g("mlp.down_proj").T
    head = p["model.embed_tokens.weight"] if c["tied"] else p["lm_head.weight"]
    return rms(h, p["model.norm.weight"]) @ head.T


def squares(name, v):
    v = v.detach().double()
    if name.endswith("c_attn.bias"):
        q, _, v3 = v.chunk(3)
        v = torch.cat([q, v3])
    return float(v.pow(2).sum())


def make(name, family, c):
    torch.manual_seed(5)
    shapes = (gpt2_params if family == 0 else llama_params)(c)
    model = gpt2 if family == 0 else llama
    p = {}
    for k, s in shapes.items():
        norm = len(s) == 1 and k.endswith("weight")
        p[k] = (1.0 + 0.1 * torch.randn(s) if norm else 0.08 * torch.randn(s)).requires_grad_()
    start = {k: v.detach().clone() for k, v in p.items()}
    B, T, A, S = 2, 24, 2, 20
    data = torch.randint(0, c["vocab"], (4, A, B, T + 1))
    tokens = torch.stack([data[s % 4, ..., :-1] for s in range(S)])
    targets = torch.stack([data[s % 4, ..., 1:] for s in range(S)])
    with torch.no_grad():
        logits = torch.stack([model(p, c, tokens[0, 0, :1, :n])[0, -1] for n in (T, T // 3)])
    opt = torch.optim.AdamW(p.values(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    losses, norms, grads = [], [], None
    for s in range(S):
        opt.zero_grad()
        total = 0.0
        for a in range(A):
            loss = F.cross_entropy(model(p, c, tokens[s, a]).view(-1, c["vocab"]), targets[s, a].reshape(-1)) / A
            loss.backward()
            total += loss.item()
        if s == 0:
            grads = {k: v.grad.clone() for k, v in p.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(p.values(), 1.0)))
        losses.append(total)
        opt.step()
    out = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vectors", f"torch_{name}.bin")
    with open(out, "wb") as f:
        f.write(struct.pack("<16i", 0x53505754, family, c["vocab"], c["width"], c["layers"], c["heads"], c["kv_heads"],
                            c["head_dim"], c["mlp"], c["positions"], T, B, A, S, c["tied"], len(p)))
        for k in p:
            f.write(struct.pack("<i", len(k)) + k.encode() + struct.pack("<i", start[k].numel()))
            f.write(start[k].numpy().tobytes() + grads[k].numpy().tobytes())
        f.write(tokens.int().numpy().tobytes() + targets.int().numpy().tobytes() + logits.numpy().tobytes())
        f.write(struct.pack(f"<{S}d", *losses) + struct.pack(f"<{S}d", *norms))
        f.write(struct.pack(f"<{len(p)}d", *(squares(k, v) for k, v in p.items())))
    print(name, losses[0], losses[-1], norms[0], os.path.getsize(out))


base = dict(vocab=61, width=32, layers=2, heads=4, kv_heads=4, head_dim=8, mlp=128, positions=40, tied=1)
make("gpt2", 0, base)
make("llama_tied", 1, base | dict(kv_heads=2, mlp=88))
make("llama_untied", 1, base | dict(kv_heads=1, mlp=72, tied=0))
