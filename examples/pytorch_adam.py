"""Spillway's AdamW as a drop-in PyTorch optimizer for CPU tensors, through ctypes and libspillway.so.

    from pytorch_adam import SpillwayAdamW
    optimizer = SpillwayAdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

Parameters are fp32; gradients may be fp32, bf16 or fp16. The update works in place on the tensors' memory, one pass,
on the library's own threads. The same bits on every instruction set and thread count.

    python3 examples/pytorch_adam.py [--check]    compares it with torch.optim.AdamW: result, then speed
"""
import argparse
import ctypes
import os
import pathlib
import sys
import time
import weakref

import torch

c_float_p, c_u64, c_double = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_double


class Hp(ctypes.Structure):  # spw_adam_hp
    _fields_ = [("lr", c_double), ("beta1", c_double), ("beta2", c_double), ("eps", c_double),
                ("weight_decay", c_double), ("decoupled", ctypes.c_bool), ("bias_correction", ctypes.c_bool),
                ("step", c_u64), ("grad_scale", c_double)]


class Coef(ctypes.Structure):  # spw_adam_coef
    _fields_ = [(n, ctypes.c_float) for n in ("grad_scale", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2",
                                              "eps", "l2", "decay", "step_size", "inv_bc2_sqrt")]


class Slice(ctypes.Structure):  # spw_adam_slice
    _fields_ = [("format", ctypes.c_int), ("elems", c_u64), ("weights", ctypes.c_void_p), ("master", ctypes.c_void_p),
                ("m", ctypes.c_void_p), ("v", ctypes.c_void_p), ("grad", ctypes.c_void_p), ("grad_dtype", ctypes.c_int)]


class Work(ctypes.Structure):  # spw_adam_work
    _fields_ = [("coef", Coef), ("slice", Slice), ("first_part", ctypes.c_uint32)]


class Error(ctypes.Structure):  # spw_error, as far as it is read here
    _fields_ = [("status", ctypes.c_int), ("sys_errno", ctypes.c_int), ("message", ctypes.c_char * 768)]


def load_library():
    name = os.environ.get("SPW_LIBRARY") or str(pathlib.Path(__file__).resolve().parent.parent / "libspillway.so")
    lib = ctypes.CDLL(name)
    lib.spw_adam_prepare.argtypes = [ctypes.POINTER(Coef), ctypes.POINTER(Hp), ctypes.POINTER(Error)]
    lib.spw_adam_prepare.restype = ctypes.c_int
    lib.spw_adam_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(Work), ctypes.c_uint32]
    lib.spw_adam_run.restype = c_u64
    lib.spw_pool_create.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint32, ctypes.c_char_p,
                                    ctypes.POINTER(Error)]
    lib.spw_pool_create.restype = ctypes.c_int
    lib.spw_pool_destroy.argtypes = [ctypes.c_void_p]
    return lib


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # spw_dtype


class SpillwayAdamW(torch.optim.Optimizer):
    """AdamW (decoupled=True) or Adam with L2; parameters are contiguous fp32 CPU tensors."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, decoupled=True, threads=None):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled=decoupled))
        self.lib = load_library()
        self.pool, err = ctypes.c_void_p(), Error()
        if self.lib.spw_pool_create(ctypes.byref(self.pool), threads or 0, b"adam", ctypes.byref(err)) != 0:
            raise OSError(err.message.decode())
        weakref.finalize(self, self.lib.spw_pool_destroy, self.pool)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        works, grads = [], []  # grads stay alive until all is done
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.device.type != "cpu" or p.dtype != torch.float32 or not p.is_contiguous():
                    raise TypeError("parameters must be contiguous fp32 tensors on the CPU")
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                hp = Hp(group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["decoupled"], True,
                        state["step"], 1.0)
                coef, err = Coef(), Error()
                if self.lib.spw_adam_prepare(ctypes.byref(coef), ctypes.byref(hp), ctypes.byref(err)) != 0:
                    raise ValueError(err.message.decode())
                grad = p.grad.contiguous()
                grads.append(grad)
                part = Slice(0, p.numel(), p.data_ptr(), None, state["exp_avg"].data_ptr(),
                             state["exp_avg_sq"].data_ptr(), grad.data_ptr(), DTYPES[grad.dtype])
                works.append(Work(coef, part))
        self.lib.spw_adam_run(self.pool, (Work * len(works))(*works), len(works))
        return loss


def check():
    """100 steps beside torch.optim.AdamW in float64; the error may not be above twice that of PyTorch's float32."""
    shapes = [(3,), (257, 33), (1 << 19) + 5]
    shapes = [s if isinstance(s, tuple) else (s,) for s in shapes]
    torch.manual_seed(1)
    start = [torch.randn(s) for s in shapes]
    def run(make, dtype):
        params = [torch.nn.Parameter(s.clone().to(dtype)) for s in start]
        optimizer = make(params)
        generator = torch.Generator().manual_seed(2)
        for _ in range(100):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()
        return [p.detach().double() for p in params]
    args = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    truth = run(lambda p: torch.optim.AdamW(p, **args), torch.float64)
    theirs = run(lambda p: torch.optim.AdamW(p, **args), torch.float32)
    ours = run(lambda p: SpillwayAdamW(p, **args), torch.float32)
    again = run(lambda p: SpillwayAdamW(p, threads=1, **args), torch.float32)
    error = lambda x: max((a - b).abs().max().item() for a, b in zip(x, truth))
    print("largest error after 100 steps: spillway %.2e, torch float32 %.2e" % (error(ours), error(theirs)))
    same = all(torch.equal(a, b) for a, b in zip(ours, again))
    print("1 thread and all threads give %s bits" % ("the same" if same else "OTHER"))
    return same and error(ours) <= 2 * error(theirs) + 1e-9


def speed():
    """Interleaved with torch's implementations, medians of 9 steps."""
    n, runs = 16_000_000, {}
    def make(name, build):
        p = torch.nn.Parameter(torch.randn(n))
        p.grad = torch.randn(n)
        runs[name] = (build([p]), [])
    make("spillway", lambda p: SpillwayAdamW(p))
    make("torch foreach", lambda p: torch.optim.AdamW(p, foreach=True))
    make("torch fused", lambda p: torch.optim.AdamW(p, fused=True))
    for round_ in range(10):
        for optimizer, times in runs.values():
            time.sleep(0.05)  # OpenMP's threads spin for a while after their work, beside whoever is next
            begin = time.perf_counter()
            optimizer.step()
            if round_ > 0:
                times.append(time.perf_counter() - begin)
    medians = {name: sorted(times)[len(times) // 2] for name, (_, times) in runs.items()}
    for name, t in medians.items():
        print("%-14s %7.0f Mparam/s   %.2f x spillway's time" % (name, n / t * 1e-6, t / medians["spillway"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="results only")
    arguments = parser.parse_args()
    good = check()
    if not arguments.check:
        speed()
    sys.exit(0 if good else 1)
