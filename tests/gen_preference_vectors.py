"""Vectors for test_preference.c: losses of pairs of answers, with 60 digits, derivatives by differences. Needs mpmath.

Formulas as papers have them, of log p: DPO (arXiv 2305.18290, equation 7, labels smoothed), IPO (2310.12036, equation 17, of means),
SimPO (2405.14734, equation 6), ORPO (2403.07691, equations 6 and 7), APO-zero (2408.06266). Inputs are sums of powers of two, which a float holds.
usage: python3 tests/gen_preference_vectors.py > tests/vectors/preference_vectors.h
"""
from mpmath import mp, mpf, exp, log

mp.dps = 60
# rule: kind, beta, label smoothing, margin, likelihood; sums of -log p by the reference and by the policy; counts
CASES = [
    ("DPO", 0.125, 0.0, 0.0, 0.0, (40.5, 61.25), (38.0, 63.5), (20, 31)),
    ("DPO", 0.125, 0.25, 0.0, 0.0, (40.5, 61.25), (44.0, 55.5), (20, 31)),
    ("DPO", 0.5, 0.125, 0.0, 0.75, (17.0, 9.5), (12.25, 30.0), (7, 3)),
    ("DPO", 1.0, 0.0, 0.0, 0.0, (100.0, 100.0), (80.0, 130.0), (50, 60)),
    ("DPO", 1.0, 0.0, 0.0, 0.0, (100.0, 100.0), (10100.0, 100.0), (50, 60)),
    ("DPO", 1.0, 0.0, 0.0, 0.0, (100.0, 100.0), (100.0, 800.0), (50, 60)),
    ("DPO", 2.0, 0.0625, 0.0, 0.0, (0.0, 0.0), (8192.0, 8192.0), (1, 1)),
    ("IPO", 0.125, 0.0, 0.0, 0.0, (40.5, 61.25), (38.0, 63.5), (20, 31)),
    ("IPO", 0.5, 0.0, 0.0, 0.25, (17.0, 9.5), (12.25, 30.0), (7, 3)),
    ("SIMPO", 2.0, 0.0, 0.5, 0.0, (0.0, 0.0), (38.0, 63.5), (20, 31)),
    ("SIMPO", 10.0, 0.125, 3.0, 0.5, (0.0, 0.0), (44.0, 55.5), (20, 11)),
    ("SIMPO", 2.5, 0.0, 1.5, 0.0, (0.0, 0.0), (4096.0, 3.5), (1, 2)),
    ("ORPO", 0.125, 0.0, 0.0, 1.0, (0.0, 0.0), (38.0, 63.5), (20, 31)),
    ("ORPO", 0.5, 0.0, 0.0, 0.0, (0.0, 0.0), (44.0, 0.5), (20, 64)),
    ("ORPO", 1.0, 0.0, 0.0, 1.0, (0.0, 0.0), (0.0625, 300.0), (64, 3)),
    ("ORPO", 0.25, 0.0, 0.0, 0.5, (0.0, 0.0), (4096.0, 3.5), (1, 2)),
    ("APO_ZERO", 0.125, 0.0, 0.0, 0.0, (40.5, 61.25), (38.0, 63.5), (20, 31)),
    ("APO_ZERO", 0.5, 0.0, 0.0, 0.75, (17.0, 9.5), (12.25, 30.0), (7, 3)),
    ("APO_ZERO", 1.0, 0.0, 0.0, 0.0, (100.0, 100.0), (140.0, 40.0), (50, 60)),
]


def loss(case, chosen, rejected):
    kind, beta, smoothing, margin, likelihood, reference, _, counts = case
    policy, beta = (-chosen, -rejected), mpf(beta)
    if kind == "DPO":
        h = beta * ((policy[0] + reference[0]) - (policy[1] + reference[1]))
    elif kind == "SIMPO":
        h = beta * policy[0] / counts[0] - beta * policy[1] / counts[1] - margin
    elif kind == "ORPO":
        p = [exp(policy[k] / counts[k]) for k in range(2)]
        h = log(p[0] / (1 - p[0]) / (p[1] / (1 - p[1])))
        return -beta * log(1 / (1 + exp(-h))) - likelihood * policy[0] / counts[0]
    if kind == "APO_ZERO":
        y = 1 - 1 / (1 + exp(-beta * (policy[0] + reference[0]))) + 1 / (1 + exp(-beta * (policy[1] + reference[1])))
    elif kind == "IPO":
        gap = (policy[0] + reference[0]) / counts[0] - (policy[1] + reference[1]) / counts[1]
        y = (gap - 1 / (2 * beta)) ** 2
    else:
        y = -(1 - mpf(smoothing)) * log(1 / (1 + exp(-h))) - smoothing * log(1 / (1 + exp(h)))
    return y - likelihood * policy[0] / counts[0]


def rewards(case):
    kind, beta, _, _, _, reference, sums, counts = case
    if kind in ("SIMPO", "ORPO"):
        return [-mpf(beta) * sums[k] / counts[k] for k in range(2)]
    return [mpf(beta) * (reference[k] - sums[k]) for k in range(2)]


print("/* Written by tests/gen_preference_vectors.py; see there. */\n/* clang-format off */")
print("typedef struct preference_vector {\n    spw_preference rule;\n    spw_pair pair;\n    double sums[2];\n"
      "    uint64_t counts[2];\n    spw_preferred want;\n} preference_vector;")
print("static const preference_vector preference_vectors[] = {")
for case in CASES:
    kind, beta, smoothing, margin, likelihood, reference, sums, counts = case
    # a sigmoid below e^-10000 needs as many digits as its exponent has, so that differences of the loss show it
    mp.dps = 200 if max(sums) < 500 else 9000
    step, (a, b) = mpf(10) ** -15, [mpf(s) for s in sums]
    coef = [(loss(case, a + step, b) - loss(case, a - step, b)) / (2 * step),
            (loss(case, a, b + step) - loss(case, a, b - step)) / (2 * step)]
    text = ["%s" % mp.nstr(v, 20, min_fixed=-5, max_fixed=20) for v in [loss(case, a, b)] + coef + rewards(case)]
    print("    {{SPW_PREFERENCE_%s, %s, %s, %s, %s}, {0, 0, 0, {%s, %s}}, {%s, %s}, {%d, %d}, {%s, {%s, %s}, {%s, %s}}},"
          % ((kind, beta, smoothing, margin, likelihood) + reference + sums + counts + tuple(text)))
print("};")
