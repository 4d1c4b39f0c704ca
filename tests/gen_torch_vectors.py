#!/usr/bin/env python3
"""Makes tests/vectors/torch_*.bin: small models trained by plain PyTorch in fp32, written from the formulas.

With the argument muon it makes torch_muon.bin only: what the same models, weights and tokens come to when the blocks' matrices take
Muon and all else AdamW. It says how far from that fp64 ends. The file holds gpt2, llama_tied and llama_untied, one after the other:
int32 steps, fp64 losses (steps), fp64 gradient norms before clipping (steps), int32 tensors, fp64 sums of squares of the final weights
in the order of the other files, without the same third.

With the argument preference it makes torch_preference.bin only: what the same models come to when each sequence of tokens holds two pairs
of answers and what is minimised is DPO, IPO, SimPO, ORPO or APO-zero of these, by AdamW. For gpt2, llama_tied and llama_untied, and of each for every rule
of RULES: int32 kind (of KINDS), fp64 beta, label smoothing, margin, likelihood, then fp64 losses (steps), gradient norms
(steps), and means of the chosen reward less the rejected one (steps), int32 tensors, fp64 sums of squares.

Layout of the other files, little-endian: int32 header of 16 (magic 0x53505754, family 0 gpt2 / 1 llama, vocab, width, layers, heads,
kv heads, head size, MLP width, positions, T, micro-batch B, accumulation A, steps, tied, tensors); then per tensor int32 name
length, name, int32 count, fp32 weights, fp32 gradients of the first step; then int32 tokens and targets (steps, A, B, T); fp32
logits (2, vocab) of the first sequence: of its last token, and of the last of its first T / 3 tokens; fp64 losses (steps); fp64
gradient norms before clipping (steps); fp64 sums of squares of the final weights (tensors). All before the first step but the last
three. The sums leave out the key third of GPT-2's packed bias: softmax does not change when all keys shift, so its gradient is 0
(1e-18 in fp64) and Adam makes of the rounding noise of about 1e-9 steps that no two implementations share; PyTorch's own fp32 and
fp64 runs differ by 6e-4 there, and by less than 1e-6 in the other two thirds.
"""
import math, os, struct, sys
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
B, T, A, S = 2, 24, 2, 20


def path_of(name):
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "vectors", f"torch_{name}.bin")


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
    cos, sin = a.cos().float().to(x.dtype), a.sin().float().to(x.dtype)
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


def begin(family, c, dtype=torch.float32):
    """Start weights, tokens and targets: the same ones whenever asked."""
    torch.manual_seed(5)
    shapes = (gpt2_params if family == 0 else llama_params)(c)
    p = {}
    for k, s in shapes.items():
        norm = len(s) == 1 and k.endswith("weight")
        p[k] = (1.0 + 0.1 * torch.randn(s) if norm else 0.08 * torch.randn(s)).to(dtype).requires_grad_()
    data = torch.randint(0, c["vocab"], (4, A, B, T + 1))
    tokens = torch.stack([data[s % 4, ..., :-1] for s in range(S)])
    targets = torch.stack([data[s % 4, ..., 1:] for s in range(S)])
    return p, tokens, targets


def train(p, model, c, tokens, targets, step, first=lambda: None):
    """Losses and norms of S steps; first() is called with the gradients of the first one."""
    losses, norms = [], []
    for s in range(S):
        total = 0.0
        for v in p.values():
            v.grad = None
        for a in range(A):
            loss = F.cross_entropy(model(p, c, tokens[s, a]).view(-1, c["vocab"]), targets[s, a].reshape(-1)) / A
            loss.backward()
            total += loss.item()
        if s == 0:
            first()
        norms.append(float(torch.nn.utils.clip_grad_norm_(p.values(), 1.0)))
        losses.append(total)
        step()
    return losses, norms


def adamw(params):
    return torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)


class Muon:
    """Jordan et al. 2024, with Nesterov's momentum and five iterations: x -> a x + b x^3 + c x^5 of every singular value."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.1):
        self.params, self.lr, self.mu, self.decay = list(params), lr, momentum, weight_decay
        self.m = [torch.zeros_like(w) for w in self.params]

    @staticmethod
    def orthogonal(u):
        x = u / (torch.sqrt((u * u).sum()) + 1e-7)
        tall = u.shape[0] > u.shape[1]
        if tall:
            x = x.T
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
        return (x.T if tall else x) * math.sqrt(max(1.0, u.shape[0] / u.shape[1]))

    @torch.no_grad()
    def step(self):
        for w, m in zip(self.params, self.m):
            m += (1 - self.mu) * (w.grad - m)
            w.copy_(w * (1 - self.lr * self.decay) - self.lr * self.orthogonal(w.grad + self.mu * (m - w.grad)))


def make(name, family, c):
    model = gpt2 if family == 0 else llama
    p, tokens, targets = begin(family, c)
    start = {k: v.detach().clone() for k, v in p.items()}
    with torch.no_grad():
        logits = torch.stack([model(p, c, tokens[0, 0, :1, :n])[0, -1] for n in (T, T // 3)])
    grads = {}
    losses, norms = train(p, model, c, tokens, targets, adamw(p.values()).step,
                          lambda: grads.update({k: v.grad.clone() for k, v in p.items()}))
    out = path_of(name)
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


def run_muon(family, c, dtype):
    p, tokens, targets = begin(family, c, dtype)
    matrix = lambda k: len(p[k].shape) == 2 and k.startswith(("h.", "model.layers."))
    both = Muon([v for k, v in p.items() if matrix(k)], lr=2e-3), adamw([v for k, v in p.items() if not matrix(k)])
    losses, norms = train(p, gpt2 if family == 0 else llama, c, tokens, targets, lambda: [o.step() for o in both])
    return losses, norms, [squares(k, v) for k, v in p.items()]


def make_muon(models):
    out = path_of("muon")
    with open(out, "wb") as f:
        for name, family, c in models:
            got, exact = (run_muon(family, c, dtype) for dtype in (torch.float32, torch.float64))
            losses, norms, sums = got
            f.write(struct.pack(f"<i{S}d{S}d", S, *losses, *norms) + struct.pack(f"<i{len(sums)}d", len(sums), *sums))
            apart = [max(abs(x - y) / y for x, y in zip(a, b)) for a, b in zip(got, exact)]
            print(name, losses[0], losses[-1], "from fp64: losses %.1e, norms %.1e, squares %.1e" % tuple(apart))
    print("muon", os.path.getsize(out))


# Rows of a sequence: a chosen answer's document, the rejected one's, and so on; the first two tokens of each are its prompt. The last row is padding.
DOCUMENTS = [(0, 7), (7, 13), (13, 18), (18, 23)]
KINDS = ["dpo", "ipo", "simpo", "orpo", "apo_zero"]
RULES = [("dpo", 0.3, 0.0, 0.0, 0.0), ("dpo", 0.3, 0.1, 0.0, 0.5), ("ipo", 0.2, 0.0, 0.0, 0.0), ("simpo", 2.0, 0.0, 0.5, 0.0),
         ("orpo", 0.5, 0.0, 0.0, 1.0), ("apo_zero", 0.3, 0.0, 0.0, 0.0)]


def answers(p, model, c, tokens):
    """Sums of log p (B, 4) and numbers of targets (4): each document by itself."""
    sums, counts = [], []
    for first, end in DOCUMENTS:
        x = tokens[:, first:end]
        log_p = torch.log_softmax(model(p, c, x), -1)[:, 1:-1].gather(-1, x[:, 2:, None])[..., 0]
        sums.append(log_p.sum(-1))
        counts.append(log_p.shape[1])
    return torch.stack(sums, -1), torch.tensor(counts)


def preference(rule, got, reference, counts):
    """Losses of pairs (B, 2) and rewards of both answers."""
    kind, beta, smoothing, margin, likelihood = rule
    ratio, mean = got - reference, got / counts
    rewards = beta * (mean if kind in ("simpo", "orpo") else ratio)
    if kind == "ipo":
        per = ratio / counts
        loss = (per[:, ::2] - per[:, 1::2] - 1 / (2 * beta)) ** 2
    elif kind == "orpo":
        odds = mean - torch.log1p(-torch.exp(mean))
        loss = -beta * F.logsigmoid(odds[:, ::2] - odds[:, 1::2])
    elif kind == "apo_zero":
        loss = 1 - torch.sigmoid(rewards[:, ::2]) + torch.sigmoid(rewards[:, 1::2])
    else:
        h = rewards[:, ::2] - rewards[:, 1::2] - margin
        loss = -(1 - smoothing) * F.logsigmoid(h) - smoothing * F.logsigmoid(-h)
    return loss - likelihood * mean[:, ::2], rewards[:, ::2], rewards[:, 1::2]


def run_preference(family, c, rule, dtype):
    model = gpt2 if family == 0 else llama
    p, tokens, _ = begin(family, c, dtype)
    with torch.no_grad():
        reference = [[answers(p, model, c, tokens[s, a])[0] for a in range(A)] for s in range(S)]
    step = adamw(p.values()).step
    losses, norms, margins = [], [], []
    for s in range(S):
        for v in p.values():
            v.grad = None
        parts = [preference(rule, *((got := answers(p, model, c, tokens[s, a]))[0], reference[s][a], got[1])) for a in range(A)]
        loss = torch.stack([x[0].mean() for x in parts]).mean()
        loss.backward()
        margins.append(float(torch.stack([(x[1] - x[2]).mean() for x in parts]).mean()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(p.values(), 1.0)))
        losses.append(loss.item())
        step()
    return losses, norms, margins, [squares(k, v) for k, v in p.items()]


def make_preference(models):
    out = path_of("preference")
    with open(out, "wb") as f:
        for name, family, c in models:
            for rule in RULES:
                got, exact = (run_preference(family, c, rule, dtype) for dtype in (torch.float32, torch.float64))
                f.write(struct.pack("<i4d", KINDS.index(rule[0]), *rule[1:]))
                for values in got[:3]:
                    f.write(struct.pack(f"<{S}d", *values))
                f.write(struct.pack(f"<i{len(got[3])}d", len(got[3]), *got[3]))
                apart = [max(abs(x - y) / max(abs(y), 1e-3) for x, y in zip(a, b)) for a, b in zip(got, exact)]
                print(name, *rule, got[0][0], got[0][-1], got[2][-1], "from fp64: losses %.1e, norms %.1e, margins %.1e, squares %.1e" % tuple(apart))
    print("preference", os.path.getsize(out))


base = dict(vocab=61, width=32, layers=2, heads=4, kv_heads=4, head_dim=8, mlp=128, positions=40, tied=1)
models = [("gpt2", 0, base), ("llama_tied", 1, base | dict(kv_heads=2, mlp=88)),
          ("llama_untied", 1, base | dict(kv_heads=1, mlp=72, tied=0))]
if sys.argv[1:] == ["preference"]:
    make_preference(models)
    sys.exit()
if sys.argv[1:] != ["muon"]:
    for m in models:
        make(*m)
    make_preference(models)
make_muon(models)
