"""Writes tests/vectors/adam_vectors.h: what PyTorch's Adam and AdamW make of the same numbers, on the CPU in fp32.

Gradients and first parameters come from an integer hash that the test repeats, so that only results are stored. Run it
from the repository's root: python3 tests/gen_adam_vectors.py
"""
import numpy as np
import torch

ELEMS = 64
STEPS = (1, 10, 100)
# name, decoupled, lr, beta1, beta2, eps, weight_decay
CASES = [
    ("AdamW", True, 1e-3, 0.9, 0.999, 1e-8, 0.1),
    ("AdamW, other betas", True, 3e-4, 0.95, 0.95, 1e-6, 0.0),
    ("Adam with L2", False, 1e-3, 0.9, 0.999, 1e-8, 0.02),
]


def unit(key):
    """A multiple of 2^-23 in [-1, 1) from one 32-bit key (an integer hash with full avalanche)."""
    x = key & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    x ^= x >> 16
    return ((x >> 8) - (1 << 23)) / float(1 << 23)


def first_params():
    """Magnitude in [0.5, 1.5), so that no parameter crosses zero and one ulp keeps its meaning."""
    out = []
    for i in range(ELEMS):
        u = unit(0x10000000 + i)
        out.append((1.0 + u / 2) * (-1.0 if i & 1 else 1.0))
    return np.array(out, dtype=np.float32)


def grads(step):
    """Even elements have a mean of 1/2, odd ones of 0."""
    return np.array([unit(step * ELEMS + i) + (0.0 if i & 1 else 0.5) for i in range(ELEMS)], dtype=np.float32)


def main():
    lines = [
        "/* Written by tests/gen_adam_vectors.py with PyTorch %s; not edited by hand. */" % torch.__version__.split("+")[0],
        "enum { VECTOR_ELEMS = %d, VECTOR_CASES = %d, VECTOR_STEPS = %d };" % (ELEMS, len(CASES), len(STEPS)),
        "static const unsigned vector_steps[VECTOR_STEPS] = {%s};" % ", ".join(map(str, STEPS)),
        "static const struct vector_case {",
        "    const char *name;",
        "    bool decoupled;",
        "    double lr, beta1, beta2, eps, weight_decay;",
        "    uint32_t bits[VECTOR_STEPS][3][VECTOR_ELEMS]; /* parameter, m, v as fp32 */",
        "} vector_cases[VECTOR_CASES] = {",
    ]
    for name, decoupled, lr, beta1, beta2, eps, decay in CASES:
        p = torch.nn.Parameter(torch.from_numpy(first_params()))
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        opt = kind([p], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, foreach=False, fused=False)
        lines.append('    {"%s", %s, %r, %r, %r, %r, %r, {' % (name, str(decoupled).lower(), lr, beta1, beta2, eps, decay))
        for step in range(1, STEPS[-1] + 1):
            p.grad = torch.from_numpy(grads(step))
            opt.step()
            if step in STEPS:
                state = opt.state[p]
                lines.append("        {")
                for t in (p.detach(), state["exp_avg"], state["exp_avg_sq"]):
                    bits = t.numpy().view(np.uint32)
                    lines.append("            {")
                    for i in range(0, ELEMS, 8):
                        lines.append("                " + " ".join("0x%08x," % b for b in bits[i : i + 8]))
                    lines.append("            },")
                lines.append("        },")
        lines.append("    }},")
    lines.append("};")
    with open("tests/vectors/adam_vectors.h", "w") as f:
        f.write("\n".join(lines) + "\n")


main()
