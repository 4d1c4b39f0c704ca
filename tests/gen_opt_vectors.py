"""Vectors for test_optimizers.c: 100 steps of PyTorch's optimizers in float64 and float32. Needs torch and numpy.

Weights start at w_i = sin(i + 1); the gradient of step t is g_i = sin(0.7 i + 1.3 t) * 10 ** (i % 5 - 3), rounded to
float32 once, so that the test can make the same. Lion is not part of PyTorch: it follows Algorithm 2 of its paper.
usage: python3 tests/gen_opt_vectors.py > tests/vectors/opt_vectors.h
"""
import math
import numpy as np
import torch

N, STEPS = 16, 100
CASES = [
    ("Adam", "adam", dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)),
    ("Adam", "adam_l2", dict(lr=1e-2, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)),
    ("AdamW", "adamw", dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)),
    ("Adagrad", "adagrad", dict(lr=1e-1, eps=1e-10, weight_decay=0.0, lr_decay=0.0)),
    ("Adagrad", "adagrad_decay", dict(lr=1e-1, eps=1e-8, weight_decay=0.05, lr_decay=0.01)),
    ("SGD", "sgd", dict(lr=1e-2, momentum=0.0, weight_decay=0.0)),
    ("SGD", "sgd_momentum", dict(lr=1e-2, momentum=0.9, weight_decay=0.01)),
    ("SGD", "sgd_dampening", dict(lr=1e-2, momentum=0.9, dampening=0.5)),
    ("SGD", "sgd_nesterov", dict(lr=1e-2, momentum=0.95, nesterov=True, weight_decay=0.01)),
    ("Lion", "lion", dict(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)),
]


def gradient(t):
    return np.array([np.float32(math.sin(0.7 * i + 1.3 * t) * 10.0 ** (i % 5 - 3)) for i in range(N)], np.float32)


def start():
    return np.array([np.float32(math.sin(i + 1)) for i in range(N)], np.float32)


def run_lion(dtype, lr, betas, weight_decay):
    w, m = start().astype(dtype), np.zeros(N, dtype)
    one = dtype(1)
    for t in range(1, STEPS + 1):
        g = gradient(t).astype(dtype)
        u = dtype(betas[0]) * m + dtype(1 - betas[0]) * g
        w = w * dtype(1 - lr * weight_decay) - dtype(lr) * np.sign(u)
        m = dtype(betas[1]) * m + dtype(1 - betas[1]) * g
    return w, [m]


def run_torch(name, dtype, args):
    p = torch.nn.Parameter(torch.tensor(start(), dtype=dtype))
    o = getattr(torch.optim, name)([p], foreach=False, **args)
    for t in range(1, STEPS + 1):
        p.grad = torch.tensor(gradient(t), dtype=dtype)
        o.step()
    s = o.state[p]
    keys = {"Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq"), "Adagrad": ("sum",),
            "SGD": ("momentum_buffer",)}[name]
    moments = [s[k].numpy() if k in s and s[k] is not None else None for k in keys]
    return p.detach().numpy(), moments


def array(x):
    return "{" + ", ".join(float(v).hex() for v in x) + "}"


print("/* Written by tests/gen_opt_vectors.py with PyTorch %s; see there. */" % torch.__version__.split("+")[0])
print("enum { OPT_VECTOR_N = %d, OPT_VECTOR_STEPS = %d };" % (N, STEPS))
print("typedef struct opt_vector {\n    const char *name, *type;\n    double lr, beta1, beta2, eps, weight_decay, momentum, "
      "dampening, lr_decay;\n    bool nesterov;\n    int moment_count;\n    double w64[OPT_VECTOR_N], m64[2][OPT_VECTOR_N];"
      "\n    float w32[OPT_VECTOR_N];\n} opt_vector;")
print("static const opt_vector opt_vectors[] = {")
for name, label, args in CASES:
    if name == "Lion":
        w64, m64 = run_lion(np.float64, **args)
        w32, _ = run_lion(np.float32, **args)
    else:
        w64, m64 = run_torch(name, torch.float64, args)
        w32, _ = run_torch(name, torch.float32, args)
    b = args.get("betas", (0, 0))
    ms = [m for m in m64 if m is not None]
    print('    {"%s", "%s", %r, %r, %r, %r, %r, %r, %r, %r, %s, %d,\n     %s,\n     {%s},\n     %s},' % (
        label, name, args["lr"], b[0], b[1], args.get("eps", 0.0), args.get("weight_decay", 0.0),
        args.get("momentum", 0.0), args.get("dampening", 0.0), args.get("lr_decay", 0.0),
        "true" if args.get("nesterov") else "false", len(ms), array(w64), ", ".join(array(m) for m in ms) or "{0}",
        "{" + ", ".join(float(v).hex() + "f" for v in w32) + "}"))
print("};")
