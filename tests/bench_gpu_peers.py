"""One peer, one model, one GPU: what a training step of GPT-2 1.5B costs in PyTorch, FSDP and DeepSpeed, with the state on the device or on the host.

    python3 bench_gpu_peers.py WHO [--steps 6] [--micro 16] [--accumulation 4] [--data FILE]    needs torch, transformers, numpy (deepspeed)

WHO, all of them bf16 compute over fp32 master weights and fp32 AdamW moments, clipped to norm 1, without recomputation:

    torch                all on the device: bf16 autocast, fused AdamW (--compile compiles each block)
    fsdp                 FSDP2 in a world of 1, parameters, gradients and AdamW on the host in pinned memory. Parameters stay gathered
                         and gradients stay on the device (fp32) until the last micro-batch, so each crosses the bus once a step
    deepspeed-device     ZeRO stage 2, all on the device, fused AdamW of PyTorch
    deepspeed-offload    ZeRO stage 2, optimizer on the host (DeepSpeedCPUAdam)
    deepspeed-offload3   ZeRO stage 3, parameters and optimizer on the host
    deepspeed-super      ZeRO stage 3, SuperOffload (CUDA only). It overlaps AdamW with backward only where nothing is clipped: --clip 0
    build                builds DeepSpeed's CPU AdamW into TORCH_EXTENSIONS_DIR, where later runs find it, and says how long it took

DeepSpeed accumulates gradients in bf16 unless told otherwise; --config merges a JSON object into its configuration, for example
'{"data_types": {"grad_accum_dtype": "fp32"}}'.

Stdout has JSON lines only: one for each step, then a summary, whose median is from the 4th step on; all else goes to stderr. Device memory
is the allocator's largest since the first step began, and what it had reserved. Host memory is the largest resident set of the process
(host_peak_gib; the driver's pinned pages may be missing there), the PSS of process and children at the end (host_pss_gib), and by how much
the machine's memory in use grew (host_used_gib; the one to compare if nothing else runs there). When something fails, the last line
has "error" in place of the medians and the exit status is 1; after --limit seconds the run gives up in the same way.
"""
import argparse
import faulthandler
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import resource
import signal
import socket
import statistics
import sys
import time
import traceback

GIB = 1 << 30
PEERS = ["torch", "fsdp", "deepspeed-device", "deepspeed-offload", "deepspeed-offload3", "deepspeed-super", "build"]
ADAMW = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
ON_HOST = {"device": "cpu", "pin_memory": True}
ZERO = {
    "deepspeed-device": {"stage": 2},
    "deepspeed-offload": {"stage": 2, "offload_optimizer": ON_HOST, "overlap_comm": True, "reduce_bucket_size": 200000000},
    "deepspeed-offload3": {"stage": 3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST, "overlap_comm": True,
                           "reduce_bucket_size": 200000000, "stage3_prefetch_bucket_size": 100000000},
    # as in DeepSpeed's own examples of SuperOffload, with the default split of the cores
    "deepspeed-super": {"stage": 3, "offload_optimizer": {**ON_HOST, "super_offload": True, "cpuadam_cores_perc": 0.8},
                        "overlap_comm": False, "reduce_bucket_size": 400000000, "sub_group_size": 400000000},
}


def environment(args):
    """What the libraries read from the environment: one process without a launcher, no network, and where CUDA and ninja lie."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    if args.who == "build":
        args.device = "cpu"  # the op is plain C++; the device stays free for others
    settings = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "HF_HUB_OFFLINE": "1",
                "DS_ACCELERATOR": args.device}
    os.environ.update(settings)
    if not os.environ.get("CUDA_VISIBLE_DEVICES", "0").isdigit():
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # DeepSpeed reads a number there
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", "/tmp/peer_torch_extensions")
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    if pathlib.Path("/usr/local/cuda/bin/nvcc").exists():
        os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"


def host_in_use():
    """Bytes of the machine's memory that are in use and not just cache."""
    lines = dict(line.split(":") for line in open("/proc/meminfo"))
    return (int(lines["MemTotal"].split()[0]) - int(lines["MemAvailable"].split()[0])) * 1024


def pss_of_tree():
    total = 0
    for pid in [os.getpid()] + [child.pid for child in multiprocessing.active_children()]:
        try:
            total += sum(int(line.split()[1]) for line in open(f"/proc/{pid}/smaps_rollup") if line.startswith("Pss:")) * 1024
        except OSError:
            pass
    return total


def make_model(args):
    """GPT-2 in fp32, initialised on the device itself."""
    import torch
    import transformers
    config = transformers.GPT2Config(vocab_size=args.vocab, n_positions=args.length, n_embd=args.width, n_layer=args.layers,
                                     n_head=args.heads, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, activation_function="gelu_pytorch_tanh",
                                     use_cache=False, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa")
    torch.manual_seed(1)
    with torch.device(args.device):
        model = transformers.GPT2LMHeadModel(config)
    if model.lm_head.weight is not model.transformer.wte.weight:
        raise RuntimeError("input and output embeddings are not tied")
    return model.train()


def make_batches(args):
    """Inputs and targets on the device, indexed by step and micro-batch."""
    import numpy
    import torch
    shape = (args.steps, args.accumulation, args.micro, args.length)
    count = args.steps * args.accumulation * args.micro * args.length
    if args.data:
        tokens = numpy.memmap(args.data, dtype=numpy.uint16, mode="r", offset=1024)
        tokens = numpy.resize(numpy.asarray(tokens[:count + 1]), count + 1).astype(numpy.int64) % args.vocab
    else:
        tokens = numpy.random.default_rng(1).integers(0, args.vocab, count + 1, dtype=numpy.int64)
    tokens = torch.from_numpy(tokens).to(args.device)
    return tokens[:-1].view(shape), tokens[1:].contiguous().view(shape)


def loss_of(model, x, y):
    import torch
    logits = model(input_ids=x, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), y.reshape(-1))


def torch_peer(args):
    import torch
    model = make_model(args)
    if args.compile:
        for block in model.transformer.h:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)

    def step(inputs, targets):
        total = torch.zeros((), device=args.device)
        for x, y in zip(inputs, targets):
            with torch.autocast(args.device, torch.bfloat16):
                loss = loss_of(model, x, y)
            (loss / args.accumulation).backward()
            total += loss.detach() / args.accumulation
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return total
    return step


def fsdp_peer(args):
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    cuda = args.device == "cuda"
    torch.distributed.init_process_group("nccl" if cuda else "gloo")  # without device_id: a single rank has no peers to split from
    model = make_model(args)
    policies = {"mesh": torch.distributed.init_device_mesh(args.device, (1,)), "reshard_after_forward": False,
                "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
                "offload_policy": CPUOffloadPolicy(pin_memory=cuda)}
    for block in model.transformer.h:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    params, whole, optimizer = list(model.parameters()), [], None

    def step(inputs, targets):
        nonlocal optimizer
        total = torch.zeros((), device=args.device)
        for i, (x, y) in enumerate(zip(inputs, targets)):
            last = i == args.accumulation - 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last)
            loss = loss_of(model, x, y)
            (loss / args.accumulation).backward()
            total += loss.detach() / args.accumulation
        # in a world of 1 a shard is the whole tensor: clipping and AdamW run on the plain host tensors below the DTensors
        if optimizer is None:
            whole.extend(p.detach().to_local() for p in params)
            optimizer = torch.optim.AdamW(whole, **ADAMW, fused=True)
            if {w.device.type for w in whole} != {"cpu"}:
                raise RuntimeError("parameters are not on the host")
        for w, p in zip(whole, params):
            w.grad = p.grad.to_local()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(whole, args.clip, foreach=True)
        optimizer.step()
        for w, p in zip(whole, params):
            w.grad = p.grad = None
        return total
    return step


def merge(into, other):
    for name, value in other.items():
        into[name] = merge(dict(into[name]), value) if isinstance(value, dict) and isinstance(into.get(name), dict) else value
    return into


def deepspeed_peer(args):
    import torch
    import deepspeed
    deepspeed.init_distributed("nccl" if args.device == "cuda" else "gloo")
    model = make_model(args)
    on_device = args.who == "deepspeed-device"
    config = {
        "train_micro_batch_size_per_gpu": args.micro, "gradient_accumulation_steps": args.accumulation, "gradient_clipping": args.clip,
        "bf16": {"enabled": True, "check_grad_overflow": False}, "zero_optimization": json.loads(json.dumps(ZERO[args.who])),
        "optimizer": {"type": "AdamW", "params": {**ADAMW, **({"torch_adam": True, "fused": True} if on_device else {})}},
        "steps_per_print": 1000000,
    }
    config = merge(config, json.loads(args.config))
    if args.who == "deepspeed-super":
        if "super_offload" not in deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig.model_fields:
            raise RuntimeError(f"DeepSpeed {deepspeed.__version__} has no SuperOffload")
        needed, shm = 8.5 * sum(p.numel() for p in model.parameters()), os.statvfs("/dev/shm")
        if shm.f_bavail * shm.f_frsize < needed:  # its worker gets master weights and gradients through shared memory
            raise RuntimeError(f"SuperOffload needs {needed / GIB:.1f} GiB in /dev/shm: mount -o remount,size=32G /dev/shm")
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    print("optimizer:", type(engine.optimizer).__name__, "over", type(engine.basic_optimizer).__name__, file=sys.stderr)

    def step(inputs, targets):
        total = torch.zeros((), device=args.device)
        for x, y in zip(inputs, targets):
            loss = loss_of(engine, x, y)
            total += loss.detach() / args.accumulation
            engine.backward(loss)
            engine.step()
        return total
    return step


def build():
    start = time.monotonic()
    from deepspeed.ops.op_builder import CPUAdamBuilder
    builder = CPUAdamBuilder()
    lock = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]) / builder.name / "lock"
    lock.unlink(missing_ok=True)  # of a build that was killed: loading would wait for it without end
    builder.load(verbose=True)
    return {"seconds": time.monotonic() - start, "directory": os.environ["TORCH_EXTENSIONS_DIR"]}


def run(args, say):
    """The steps of one peer; returns the summary."""
    used_before = used = host_in_use()
    import torch
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.set_device(0)
    start = time.monotonic()
    peer = {"torch": torch_peer, "fsdp": fsdp_peer}.get(args.who, deepspeed_peer)
    step, (inputs, targets) = peer(args), make_batches(args)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    setup, seconds = time.monotonic() - start, []
    for x, y in zip(inputs, targets):
        start = time.monotonic()
        loss = step(x, y).item()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - start)
        say({"step_s": round(seconds[-1], 4), "loss": loss})
        if loss != loss:
            raise RuntimeError("the loss is not a number")
        used = max(used, host_in_use())
    middle = statistics.median(seconds[3:] or seconds[-1:])
    return {"median_step_s": round(middle, 4), "tokens_per_s": round(args.accumulation * args.micro * args.length / middle, 1),
            "device_peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 3) if cuda else None,
            "device_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3) if cuda else None,
            "host_peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 3),
            "host_pss_gib": round(pss_of_tree() / GIB, 3), "host_used_gib": round((used - used_before) / GIB, 3), "setup_s": round(setup, 1),
            "micro": args.micro, "accumulation": args.accumulation, "length": args.length, "clip": args.clip,
            "threads": torch.get_num_threads()}


def versions(args):
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "deepspeed", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    if args.device == "cuda" and "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        found["device"] = sys.modules["torch"].cuda.get_device_name()
    return found


def give_up(number, frame):
    raise TimeoutError("gave up: --limit seconds are over" if number == signal.SIGALRM else f"ended by signal {number}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("who", choices=PEERS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro", type=int, default=16, help="sequences in a micro-batch")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient; 0: no clipping")
    parser.add_argument("--data", help="1024 bytes of header, then uint16 tokens; without it, random tokens")
    parser.add_argument("--config", default="{}", help="JSON merged into DeepSpeed's configuration")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a model of 2 layers of 64, for a try")
    parser.add_argument("--compile", action="store_true", help="torch only")
    parser.add_argument("--limit", type=int, default=150, help="seconds after which to give up")
    args = parser.parse_args()
    args.width, args.layers, args.heads, args.vocab, args.length = (64, 2, 4, 512, 32) if args.small else (1600, 48, 25, 50257, 1024)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed and its compiler write to stdout

    def say(line):
        print(json.dumps(line), file=out, flush=True)

    signal.signal(signal.SIGALRM, give_up)
    signal.signal(signal.SIGTERM, give_up)
    signal.alarm(args.limit)
    faulthandler.dump_traceback_later(args.limit + 15, exit=True)  # where Python does not get to handle the signal
    environment(args)
    try:
        result = build() if args.who == "build" else run(args, say)
    except BaseException as error:
        traceback.print_exc()
        chain = [error]
        while chain[-1].__cause__ is not None:  # DeepSpeed wraps what went wrong in building an op
            chain.append(chain[-1].__cause__)
        result = {"error": " <- ".join(f"{type(e).__name__}: {str(e)[:600]}" for e in chain)}
    signal.alarm(0)
    say({"who": args.who, **result, "versions": versions(args)})
    for child in multiprocessing.active_children():
        child.kill()
    sys.stderr.flush()
    os._exit(1 if "error" in result else 0)  # tearing down tens of GiB of pinned memory and NCCL takes long and proves nothing


if __name__ == "__main__":
    main()
