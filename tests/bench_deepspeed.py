"""One DeepSpeed configuration, one model, one text: what a training step costs in Spillway, in DeepSpeed and in plain PyTorch.

    python3 tests/bench_deepspeed.py [--rounds 3] [--steps 6] [--dir FOLDER]    needs torch, transformers, deepspeed, numpy

A GPT-2 of 151 M parameters is written as a Hugging Face folder. All three start from it, compute in fp32 on all processors of
this machine, and see the same sequences in every step. The same JSON goes to Spillway and, without the sections `model`,
`data` and `spillway`, to DeepSpeed (accelerator: cpu). Rows are the state in host memory (stages 2 and 3) and on disk, each with few
and with many tokens a step. DeepSpeed runs a row with each of the settings below and is given its best one.

Programs take turns; a run's step time is the median without its first two steps, a row's the median over rounds, in the best setting.
Memory is the largest resident set of the process (wait4), bytes on disk the kernel's count (/proc/PID/io) of the last step.

Fails (exit 1) when Spillway is slower or larger than DeepSpeed in a row, when its losses are not the same digits in every placement,
or further than 1e-6 (relative) from PyTorch in float64 with the same AdamW.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH, LAYERS, HEADS, VOCAB, LENGTH = 1024, 12, 16, 256, 128
OPTIMIZER = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
PLACEMENTS = {
    "stage 2, records in memory": {"stage": 2, "offload_optimizer": CPU},
    "stage 3, all in memory": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
    "stage 3, all on disk": {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME},
}
BATCHES = {128: (1, 1), 1024: (4, 2)}  # tokens a step: micro-batch, accumulation
DISK_SETTINGS = {  # of DeepSpeed; what else was tried made no difference beyond noise
    "pipelined": {"offload_optimizer": {"pipeline_read": True, "pipeline_write": True}},
    "small groups": {"sub_group_size": 20000000},
}


def folder_of(args):
    return pathlib.Path(args.dir) / "model"


def make_folder(args):
    import numpy
    import torch
    import transformers
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, resid_pdrop=0,
                                     embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder_of(args))
    text = (ROOT / "docs/DESIGN.md").read_bytes()
    for tokens in BATCHES:
        header = numpy.zeros(256, dtype=numpy.int32)
        header[:3] = 20240520, 1, tokens + 1
        body = numpy.frombuffer(text[:tokens + 1], dtype=numpy.uint8).astype(numpy.uint16)
        (pathlib.Path(args.dir) / f"{tokens}.bin").write_bytes(header.tobytes() + body.tobytes())


def settings(args, placement, tokens, extra=None):
    """The JSON of a row, as Spillway takes it."""
    micro, accumulation = BATCHES[tokens]
    zero = json.loads(json.dumps(PLACEMENTS[placement]))
    for name, value in (extra or {}).items():
        zero[name] = {**zero[name], **value} if isinstance(value, dict) else value
    for part in zero.values():
        if isinstance(part, dict) and part["device"] == "nvme":
            part["nvme_path"] = str(pathlib.Path(args.dir) / "swap")
    return {
        "model": {"path": str(folder_of(args))},
        "data": {"path": str(pathlib.Path(args.dir) / f"{tokens}.bin"), "seq_length": LENGTH, "validation_split": 0},
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation, "gradient_clipping": 1.0,
        "optimizer": OPTIMIZER, "zero_optimization": zero, "aio": {"block_size": 1048576, "queue_depth": 16},
        "spillway": {"steps": args.steps, "device": "cpu", "checkpoint_dir": "", "eval_interval": 0, "decay_norm_and_bias": True,
                     "run_log": str(pathlib.Path(args.dir) / "run.jsonl")},
    }


def disk_bytes():
    counts = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def child(args):
    """Trains in this process, by DeepSpeed or by PyTorch alone, and prints a line for each step."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    import numpy
    import torch
    import transformers
    torch.set_num_threads(os.cpu_count())
    config = json.load(open(args.config))
    data, model_path = config.pop("data"), config.pop("model")["path"]
    config.pop("spillway")
    micro, accumulation = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    engine = None
    if args.child == "deepspeed":
        import deepspeed
        deepspeed.init_distributed("gloo")
    dtype = torch.float64 if args.child == "float64" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa").to(dtype).train()
    if args.child == "deepspeed":
        engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    else:
        p = OPTIMIZER["params"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=p["lr"], betas=p["betas"], eps=p["eps"], weight_decay=p["weight_decay"],
                                      fused=True)
    tokens = torch.from_numpy(numpy.fromfile(data["path"], dtype=numpy.uint16)[512:].astype(numpy.int64))
    shape = (accumulation, micro, data["seq_length"])
    inputs, targets = tokens[:-1].reshape(shape), tokens[1:].reshape(shape)
    for _ in range(args.steps):
        before, start, total = disk_bytes(), time.monotonic(), 0.0
        for x, y in zip(inputs, targets):
            logits = (engine or model)(input_ids=x).logits
            loss = torch.nn.functional.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))
            total += loss.item() / accumulation
            if engine:
                engine.backward(loss)
                engine.step()
            else:
                (loss / accumulation).backward()
        if not engine:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
            optimizer.step()
            optimizer.zero_grad()
        seconds, after = time.monotonic() - start, disk_bytes()
        print(json.dumps({"loss": total, "step_s": seconds, "read": after[0] - before[0], "write": after[1] - before[1]}), flush=True)


def run(args, who, placement, tokens, extra=None):
    """One run: median step time, largest resident set, bytes of the last step, losses; None when the program failed."""
    path = pathlib.Path(args.dir)
    config = path / "config.json"
    config.write_text(json.dumps(settings(args, placement, tokens, extra)))
    log = path / "run.jsonl"
    log.unlink(missing_ok=True)
    if who == "spillway":
        command = [str(ROOT / "spillway"), "train", str(config)]
    else:
        command = [sys.executable, __file__, "--child", who, "--config", str(config), "--steps", str(args.steps)]
    env = dict(os.environ, PATH=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")  # where ninja lies
    with open(path / "out", "w") as out, open(path / "err", "w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=env, cwd=path)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        print(f"{who}, {placement}, {tokens} tokens, {extra}: exit {process.returncode}\n{(path / 'err').read_text()[-600:]}")
        return None
    lines = open(log if who == "spillway" else path / "out")
    steps = [step for step in map(json.loads, (line for line in lines if line.startswith("{"))) if "loss" in step]
    if who == "spillway":
        for step in steps:
            step["read"], step["write"] = step["bytes"]["nvme_read"], step["bytes"]["nvme_write"]
    middle = {name: statistics.median(step[name] for step in steps[2:]) for name in ("step_s", "read", "write")}
    return {**middle, "peak": usage.ru_maxrss * 1024, "losses": [step["loss"] for step in steps]}


def median_of(runs):
    return {name: statistics.median(r[name] for r in runs) for name in ("step_s", "read", "write", "peak")} | {"losses": runs[-1]["losses"]}


def row(args, placement, tokens):
    """The programs in turn; returns the medians of Spillway, DeepSpeed (in its best setting) and, for the first placement, PyTorch."""
    on_disk = "disk" in placement
    programs = {"spillway": ("spillway", None)}
    if placement == next(iter(PLACEMENTS)):
        programs["torch"] = ("torch", None)
    for name, extra in (DISK_SETTINGS if on_disk else {"as it is": None}).items():
        programs[f"deepspeed, {name}"] = ("deepspeed", extra)
    runs = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, (who, extra) in programs.items():
            result = run(args, who, placement, tokens, extra)
            if result is None:
                sys.exit(1)
            runs[name].append(result)
    medians = {name: median_of(r) for name, r in runs.items()}
    best = min((name for name in medians if name.startswith("deepspeed")), key=lambda name: medians[name]["step_s"])
    return medians["spillway"], medians[best], medians.get("torch"), best


def distance(losses, reference):
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dir", default=None, help="a folder on the disk to measure, with 6 GB free")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "folder":
        return make_folder(args)
    if args.child:
        return child(args)
    with tempfile.TemporaryDirectory(prefix="bench-deepspeed-", dir=args.dir or ROOT / "build") as folder:
        args.dir = folder
        (pathlib.Path(folder) / "swap").mkdir()
        subprocess.run([sys.executable, __file__, "--child", "folder", "--dir", folder], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
        return compare(args)


def compare(args):
    bad = []
    gib, mib = 1 << 30, 1 << 20
    print(f"{'':40} {'seconds a step':^18} {'ratio':>6} {'peak memory, GiB':^18} {'read/written, MiB a step':^24} {'loss off float64 by':^20}")
    print(f"{'':40} {'here':>8} {'DeepSpeed':>9} {'':>6} {'here':>8} {'DeepSpeed':>9} {'here':>12} {'DeepSpeed':>11} {'here':>10} {'DeepSpeed':>9}")
    for tokens in BATCHES:
        reference = run(args, "float64", next(iter(PLACEMENTS)), tokens)
        digits = set()
        for placement in PLACEMENTS:
            here, peer, torch, best = row(args, placement, tokens)
            off, peer_off = distance(here["losses"], reference["losses"]), distance(peer["losses"], reference["losses"])
            digits.add(tuple(here["losses"]))
            ratio = here["step_s"] / peer["step_s"]
            name = f"{placement}, {tokens} tokens"
            print(f"{name:40} {here['step_s']:8.2f} {peer['step_s']:9.2f} {ratio:6.2f} {here['peak'] / gib:8.2f} {peer['peak'] / gib:9.2f} "
                  f"{here['read'] / mib:7.0f}/{here['write'] / mib:4.0f} {peer['read'] / mib:6.0f}/{peer['write'] / mib:4.0f} "
                  f"{off:10.1e} {peer_off:9.1e}   {best}", flush=True)
            if torch:
                print(f"{f'PyTorch alone, {tokens} tokens':40} {torch['step_s']:18.2f} {here['step_s'] / torch['step_s']:6.2f} "
                      f"{torch['peak'] / gib:18.2f} {'':>36} {distance(torch['losses'], reference['losses']):9.1e}", flush=True)
            if ratio > 1:
                bad.append(f"{name}: slower")
            if here["peak"] > peer["peak"]:
                bad.append(f"{name}: larger")
            if off > 1e-6:
                bad.append(f"{name}: losses are {off:.1e} from float64's")
        if len(digits) != 1:
            bad.append(f"{tokens} tokens: losses depend on the placement")
    print("\n".join(bad) or "faster, smaller and exact in every row")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
