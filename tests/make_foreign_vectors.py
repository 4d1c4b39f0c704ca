"""Makes tests/vectors/deepspeed, fsdp, fsdp_experts, full_experts, llmc and torch: what DeepSpeed, FSDP and torch.save write of a small Llama, llm.c of a small GPT-2, and
what must come of it.

    python3 tests/make_foreign_vectors.py        needs torch, transformers (5 for the mixtures and GPT-NeoX), safetensors, deepspeed 0.19.8; five minutes, no GPU

runs.json has, for each configuration in RUNS, the losses, learning rates and loss scales of twelve steps from start.safetensors, on one rank.

Of each case below the ranks train for four steps, save a checkpoint, and go on for four more. expect.safetensors has, as DeepSpeed's own
accessors give them, the masters ("NAME") and moments ("NAME.exp_avg", "NAME.exp_avg_sq") at the checkpoint, the masters at the end ("end.NAME"),
the losses of all steps, and of fp16 the loss scaler.
"""
import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent
SIZES = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=19,
             max_position_embeddings=16, rms_norm_eps=1e-5, tie_word_embeddings=False, initializer_range=0.2)
LENGTH, STEPS, SAVED = 8, 8, 4
COMMON = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
          "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 6, "warmup_type": "linear"}}}
FROZEN = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")
ROUND_ROBIN = "stage2_elastic"
EXPERTS = "stage2_experts"  # of the small gpt-oss in vectors/families, whose experts are one tensor
BUFFERS = "stage2_buffers"  # of a small GLM-4-MoE, with experts of a layer in one tensor, and what they are chosen by in a buffer
GEMMA4 = "stage2_gemma4"  # with experts of a layer in one tensor, layers of two sizes, and what a layer is multiplied by in a buffer
NEOX = "stage3_neox"  # whose head transformers 5 calls lm_head in memory, and embed_out in files
# name: ranks, groups (norms without decay), frozen, configuration
CASES = {
    "stage1_bf16": (2, False, False, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
    "stage1_bf16_fp32_sums": (2, True, False, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}),
    "stage2": (3, True, False, {"zero_optimization": {"stage": 2}}),
    ROUND_ROBIN: (3, True, False, {"zero_optimization": {"stage": 2, "elastic_checkpoint": True, "round_robin_gradients": True}}),
    "stage2_fp16_frozen": (2, False, True, {"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}, "zero_optimization": {"stage": 2}}),
    EXPERTS: (2, False, False, {"zero_optimization": {"stage": 2, "parameter_alignment": True}}),
    BUFFERS: (2, False, False, {"zero_optimization": {"stage": 2}}),
    GEMMA4: (2, False, False, {"zero_optimization": {"stage": 2}}),
    NEOX: (2, False, False, {"zero_optimization": {"stage": 3}}),
    "stage3": (3, True, False, {"zero_optimization": {"stage": 3, "sub_group_size": 150}}),
    "stage3_bf16_frozen": (3, False, True, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}),
}


def kind(name, **params):
    return {"type": name, "params": params}


ADAM = dict(lr=0.01, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1)
ADAMW = {"optimizer": kind("AdamW", **ADAM, torch_adam=True)}
ON_CPU = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}  # DeepSpeed's own optimizers
ANY = {"zero_allow_untested_optimizer": True}
RUN_STEPS, MICRO = 12, 2
RUN_COMMON = {"train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
RUNS = {
    "adamw": ADAMW,
    "adam": {"optimizer": kind("Adam", **ADAM, torch_adam=True)},
    "adam_l2": {"optimizer": kind("Adam", **ADAM, adam_w_mode=False, torch_adam=True)},
    "adam_cpu": {"optimizer": kind("Adam", **ADAM), **ON_CPU},
    "adam_cpu_l2": {"optimizer": kind("Adam", **ADAM, adam_w_mode=False), **ON_CPU},
    "adam_no_bias_correction": {"optimizer": kind("Adam", **ADAM, bias_correction=False), **ON_CPU},
    "adagrad": {"optimizer": kind("Adagrad", lr=0.02, eps=1e-8, weight_decay=0.05), **ON_CPU},
    # Rows of the embeddings that no token takes have gradient 0, whose sign is 0; DeepSpeed's kernels move them by lr, on a CPU and a GPU apart.
    "lion": {"optimizer": kind("Lion", lr=0.003, betas=[0.9, 0.99], weight_decay=0.1), **ON_CPU, "_frozen": ["model.embed_tokens.weight"]},
    "sgd": {"optimizer": kind("SGD", lr=0.1, momentum=0.9, weight_decay=0.01), **ANY},
    "sgd_nesterov": {"optimizer": kind("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), **ANY},
    "sgd_dampening": {"optimizer": kind("SGD", lr=0.1, momentum=0.9, dampening=0.5), **ANY},
    "accumulated": {**ADAMW, "gradient_accumulation_steps": 3, "gradient_clipping": 0.3},
    "not_clipped": {**ADAMW, "gradient_clipping": 0.0},
    "warmup": {**ADAMW, "scheduler": kind("WarmupLR", warmup_num_steps=5, warmup_max_lr=0.02, warmup_min_lr=0.001)},
    "warmup_decay": {**ADAMW, "scheduler": kind("WarmupDecayLR", warmup_num_steps=4, total_num_steps=10, warmup_max_lr=0.02, warmup_type="linear")},
    "warmup_cosine": {**ADAMW, "scheduler": kind("WarmupCosineLR", warmup_num_steps=4, total_num_steps=10, warmup_min_ratio=0.1, cos_min_ratio=0.05)},
    "one_cycle": {**ADAMW, "scheduler": kind("OneCycle", cycle_min_lr=0.001, cycle_max_lr=0.02, cycle_first_step_size=3, cycle_second_step_size=4,
                                             decay_step_size=2, decay_lr_rate=0.1, cycle_min_mom=0.8, cycle_max_mom=0.95)},
    "one_cycle_lr": {**ADAMW, "scheduler": kind("OneCycle", cycle_min_lr=0.001, cycle_max_lr=0.02, cycle_first_step_size=4, cycle_momentum=False)},
    "range_test": {**ADAMW, "scheduler": kind("LRRangeTest", lr_range_test_min_lr=0.001, lr_range_test_step_size=3, lr_range_test_step_rate=2.0,
                                              lr_range_test_staircase=True)},
    "range_test_straight": {**ADAMW, "scheduler": kind("LRRangeTest", lr_range_test_min_lr=0.001, lr_range_test_step_size=3, lr_range_test_step_rate=2.0)},
    "bf16": {**ADAMW, "bf16": {"enabled": True}},
    "fp16_window": {**ADAMW, "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 1}},
    "fp16_skips": {**ADAMW, "fp16": {"enabled": True, "initial_scale_power": 30, "loss_scale_window": 2, "hysteresis": 2},
                   "scheduler": kind("WarmupLR", warmup_num_steps=5, warmup_max_lr=0.02, warmup_type="linear")},
    "fp16_consecutive": {**ADAMW, "fp16": {"enabled": True, "initial_scale_power": 34, "loss_scale_window": 2, "hysteresis": 3,
                                           "consecutive_hysteresis": True, "min_loss_scale": 4}},
    "fp16_fixed": {**ADAMW, "fp16": {"enabled": True, "loss_scale": 128}},
}


def tokens(step, row):
    """LENGTH inputs and targets; the same formula as in the test."""
    return [(step * 7 + row * 5 + (step + 1) * i * i * 3 + i) % SIZES["vocab_size"] for i in range(LENGTH + 1)]


def make_model(name=""):
    import torch
    import transformers
    torch.manual_seed(3)
    if name == EXPERTS:
        config = json.loads((ROOT / "vectors/families/gpt_oss_full/config.json").read_text())
        config.update(num_hidden_layers=1, layer_types=["full_attention"], num_local_experts=3)
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(**config)).float()
    if name == BUFFERS:
        model = transformers.AutoModelForCausalLM.from_config(transformers.Glm4MoeConfig(
            **{**SIZES, "num_hidden_layers": 1}, head_dim=4, partial_rotary_factor=0.5, n_routed_experts=3, num_experts_per_tok=2,
            moe_intermediate_size=5, first_k_dense_replace=0, n_group=1, topk_group=1, n_shared_experts=1, routed_scaling_factor=1.5),
            experts_implementation="eager").float()
        model.model.layers[0].mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.1, -0.2, 0.05]))
        return model
    if name == GEMMA4:
        model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma4TextConfig(
            **{**SIZES, "tie_word_embeddings": True}, head_dim=4, global_head_dim=8, attention_k_eq_v=True, num_global_key_value_heads=2, sliding_window=5,
            layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0, pad_token_id=None, enable_moe_block=True, num_experts=3,
            top_k_experts=2, moe_intermediate_size=5), experts_implementation="eager").float()
        for i, layer in enumerate(model.model.layers):
            layer.layer_scalar.fill_(0.75 + 0.5 * i)
        return model
    if name == NEOX:
        sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**{**sizes, "num_hidden_layers": 1}, rotary_pct=0.5)).float()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).float()


def train(name, out):
    """One rank of a case."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import save_file
    type(get_accelerator()).is_fp16_supported = lambda self: True  # slow on a CPU, and right
    ranks, groups, frozen, config = CASES[name]
    rank, model, expect = int(os.environ["RANK"]), make_model(name), {}
    for n, p in model.named_parameters():
        p.requires_grad = not (frozen and n in FROZEN)
    params = [p for p in model.parameters() if p.requires_grad]
    if groups:
        params = [{"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1}, {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0}]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=params, config={**COMMON, **config})

    def note(prefix, moments):
        if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):  # it ran before the second group had any state
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        for n, p in engine.module.named_parameters():
            if p.requires_grad and name == ROUND_ROBIN:  # whose accessors return other parameters' parts; it trains in fp32
                expect[prefix + n] = p.detach().clone().contiguous()
            elif p.requires_grad:
                expect[prefix + n] = safe_get_full_fp32_param(p).detach().float().clone().contiguous()
                for m in moments:
                    expect[f"{n}.{m}"] = safe_get_full_optimizer_state(p, m).detach().float().clone().contiguous()
            else:
                with deepspeed.zero.GatheredParameters([p]):
                    expect[prefix + n] = p.detach().float().clone().contiguous()
        expect.update({prefix + n: b.clone() for n, b in engine.module.named_buffers() if n.endswith(("e_score_correction_bias", "layer_scalar"))})

    losses = []
    for step in range(STEPS):
        if step == SAVED:
            note("", ("exp_avg", "exp_avg_sq"))
            engine.save_checkpoint(str(out), tag=f"global_step{step}")
            s = getattr(engine.optimizer, "loss_scaler", None)
            if "fp16" in config:
                expect["scaler"] = torch.tensor([s.cur_scale, s.cur_hysteresis, s.cur_iter, s.last_overflow_iter], dtype=torch.float32)
        ids = torch.tensor([tokens(step, rank)])
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    note("end.", ())
    expect["losses"] = torch.tensor(losses, dtype=torch.float32)
    if rank == 0:
        save_file(expect, str(out / "expect.safetensors"))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of its communication may abort a process that ends in order


def make_cases():
    into = ROOT / "vectors/deepspeed"
    shutil.rmtree(into, ignore_errors=True)
    for name, (ranks, *_rest) in CASES.items():
        with tempfile.TemporaryDirectory() as work:
            env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), __file__, name, work], check=True, env=env)
            for f in sorted(pathlib.Path(work).rglob("*")):
                if f.suffix in (".pt", ".safetensors") or f.name == "latest":
                    to = into / name / f.relative_to(work)
                    to.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(f, to)


def run(name, out):
    """One of RUNS."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    type(get_accelerator()).is_fp16_supported = lambda self: True
    config, model = {**RUN_COMMON, **RUNS[name]}, make_model()
    for n, p in model.named_parameters():
        p.requires_grad = n not in config.get("_frozen", ())
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config)
    result = {"config": config, "losses": [], "lrs": [], "scales": [], "skipped": []}
    micros = config.get("gradient_accumulation_steps", 1)
    for step in range(RUN_STEPS):
        loss_sum, before = 0, engine.skipped_steps
        result["lrs"].append(engine.get_lr()[0])
        result["scales"].append(float(engine.optimizer.cur_scale))
        for k in range(micros):
            ids = torch.tensor([tokens(step, MICRO * k + row) for row in range(MICRO)])
            loss = engine(input_ids=ids, labels=ids).loss
            loss_sum += loss.item()
            engine.backward(loss)
            engine.step()
        result["losses"].append(loss_sum / micros)
        result["skipped"].append(engine.skipped_steps - before)
    out.write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


def make_runs():
    from safetensors.torch import save_file
    into, all_runs = ROOT / "vectors/deepspeed", {}
    save_file({k: v.detach().contiguous() for k, v in make_model().state_dict().items()}, str(into / "start.safetensors"))
    for name in RUNS:
        with tempfile.TemporaryDirectory() as work:
            out = pathlib.Path(work) / "run.json"
            env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RANK": "0", "WORLD_SIZE": "1",
                   "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655"}
            subprocess.run([sys.executable, __file__, "--run", name, str(out)], check=True, env=env)
            all_runs[name] = json.loads(out.read_text())
    (into / "runs.json").write_text(json.dumps(all_runs, indent=0))


def fsdp(out):
    """One rank of three: FSDP2 with a group without decay and a frozen matrix, saved by torch.distributed.checkpoint."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    rank, mesh, model, expect, losses = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),)), make_model(), {}, []
    for n, p in model.named_parameters():
        p.requires_grad = n != FROZEN[1]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1}, {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))

    def note(prefix):
        for n, p in model.named_parameters():
            expect[prefix + n] = p.full_tensor().detach().clone()
            for m in ("exp_avg", "exp_avg_sq") if p.requires_grad and not prefix else ():
                expect[f"{n}.{m}"] = optimizer.state[p][m].full_tensor().detach().clone()

    for step in range(STEPS):
        if step == SAVED:
            note("")
            whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
            for name, tensors in (("full/pytorch_model_fsdp.bin", whole[0]), ("full/optimizer.bin", whole[1])) if rank == 0 else ():
                (out / "full").mkdir(exist_ok=True)
                torch.save(tensors, out / name)
            for name, flat in (("checkpoint", False), ("flat", True)):
                weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
                dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(out / name))
        ids = torch.tensor([tokens(step, rank)])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    note("end.")
    expect["losses"] = torch.tensor(losses, dtype=torch.float32)
    if rank == 0:
        save_file(expect, str(out / "expect.safetensors"))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def fsdp_experts(out):
    """One rank of two: a small Qwen3.5-MoE in FSDP2, all experts of a layer in one tensor. Each sequence is the same, so that their order is."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import transformers
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    mesh, losses = init_device_mesh("cpu", (dist.get_world_size(),)), []
    sizes = {k: v for k, v in SIZES.items() if k != "intermediate_size"}
    config = transformers.Qwen3_5MoeTextConfig(
        **sizes, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=6, shared_expert_intermediate_size=4, full_attention_interval=2,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").float()
    if dist.get_rank() == 0:
        model.config.save_pretrained(out)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
                                   {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0}], lr=0.01, betas=(0.9, 0.95))
    ids = torch.tensor([[(5 * i * i + 3 * i + 2) % SIZES["vocab_size"] for i in [*range(LENGTH), 0]]])
    for step in range(STEPS):
        if step == SAVED:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(out))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        (out / "losses").write_text("".join(f"{x:.9g}\n" for x in losses[SAVED:]))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def llmc(rows):
    """transformers' GPT-2 trained as llm.c trains (AdamW without decay of vectors, clipping at 1): all tensors of the checkpoint and what comes of it, for so
    many sequences a step."""
    import torch
    import transformers
    torch.manual_seed(5)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=8, n_layer=2, n_head=2, vocab_size=SIZES["vocab_size"], n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        initializer_range=0.2)).float()
    named = {n.removeprefix("transformer."): p for n, p in model.named_parameters()}
    for n, p in named.items():
        if n.endswith("bias"):
            torch.nn.init.normal_(p, std=0.1)
    optimizer = torch.optim.AdamW([{"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
                                   {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0}], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    expect, losses = {}, []
    for step in range(STEPS):
        if step == SAVED:
            for n, p in named.items():
                expect.update({n: p.detach().clone(), **{f"{n}.{m}": optimizer.state[p][m].clone() for m in ("exp_avg", "exp_avg_sq")}})
        ids = torch.tensor([tokens(step, row) for row in range(rows)])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = sum(float((p.grad.double() ** 2).sum()) for p in named.values()) ** 0.5
        for p in named.values():
            p.grad *= min(1.0, 1.0 / norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    expect.update({f"end.{n}": p.detach().clone() for n, p in named.items()})
    expect["losses"] = torch.tensor(losses, dtype=torch.float32)
    return {k: v.contiguous() for k, v in expect.items()}


def make_llmc():
    """Written here by the description in llmc_state.c, for llm.c needs a GPU: of one rank, whose weights are the masters; of two, each with its part (ZeRO
    stage 1), with a loader that shuffles; of two, each with all of it."""
    import struct
    import torch
    from safetensors.torch import save_file
    into = ROOT / "vectors/llmc"
    shutil.rmtree(into, ignore_errors=True)
    vocab, padded = SIZES["vocab_size"], 128
    block = ["ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias",
             "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"]

    def arrays(tensors, suffix):
        """Each array as a list of its layers, flat."""
        out = [[torch.cat([tensors["wte.weight" + suffix], torch.zeros(padded - vocab, 8)])], [tensors["wpe.weight" + suffix]]]
        for name in block:
            layers = [tensors[f"h.{layer}.{name}{suffix}"] for layer in range(2)]
            out.append([t.t() if t.ndim > 1 else t for t in layers])  # (out, in)
        out += [[tensors["ln_f.weight" + suffix]], [tensors["ln_f.bias" + suffix]]]
        return [[t.contiguous().flatten() for t in array] for array in out]

    def raw(pieces, dtype=torch.float32):
        return torch.cat(pieces).to(dtype).contiguous().view(torch.uint8).numpy().tobytes()

    for name, ranks, cut, masters, shuffled, dtype in (("one", 1, False, False, False, torch.float32), ("parts", 2, True, True, True, torch.bfloat16),
                                                       ("copies", 2, False, True, False, torch.bfloat16)):
        expect, folder = llmc(ranks), into / name
        folder.mkdir(parents=True)
        save_file(expect, str(folder / "expect.safetensors"))
        whole = {part: arrays(expect, suffix) for part, suffix in (("m", ".exp_avg"), ("v", ".exp_avg_sq"), ("w", ""))}
        header = [20240326, 3 if dtype == torch.float32 else 5, 16, vocab, 2, 2, 8, padded]
        (folder / f"model_{SAVED:08}.bin").write_bytes(struct.pack("<256i", *header, *[0] * (256 - len(header))) +
                                                       raw([t for a in whole["w"] for t in a], dtype))
        for rank in range(ranks):
            header = [0] * 256
            header[:6] = [20240527, 1, ranks, rank, int(masters), int(shuffled)]
            header[10], header[20], header[30], header[32] = SAVED, 1337 + rank, 1, 7
            body = b""
            for part in ("m", "v", "w") if masters else ("m", "v"):
                pieces = [t for a in whole[part] for t in a]
                body += raw([t.view(ranks, -1)[rank] for t in pieces] if cut else pieces)
            if shuffled:
                body += struct.pack("<Q2iQ3i", 2, 1, 0, 3, 2, 0, 1) + bytes(range(252)) * 10
            (folder / f"state_{SAVED:08}_{rank:05}.bin").write_bytes(struct.pack("<256i", *header) + body)
        (folder / f"DONE_{SAVED:08}").write_bytes(b"")
    (into / "one/DONE_00000002").write_bytes(b"")  # of one that was removed by half: a later one counts


def make_fsdp():
    """And once more as transformers' Trainer has it: a folder of the model and one of the optimizer, here flattened."""
    import pickle
    import torch  # also for its classes
    import torch.distributed.checkpoint
    from safetensors.torch import save_file
    into = ROOT / "vectors/fsdp"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "3", __file__, "--fsdp", str(into)], check=True, env=env)
    (into / "full_hf").mkdir()
    (into / "broken").mkdir()
    for name in ("numbers", "half", "missing", "steps", "uneven"):
        whole = torch.load(into / "full/optimizer.bin")
        first, second = list(whole["state"])[:2]
        if name == "numbers":  # as an optimizer has it by itself
            whole["state"] = {i: v for i, v in enumerate(whole["state"].values())}
        elif name == "half":
            whole["state"][first]["exp_avg"] = whole["state"][first]["exp_avg"].bfloat16()
        elif name == "missing":
            del whole["state"][second]["exp_avg_sq"]
        else:
            whole["state"][first]["step"] = "four" if name == "steps" else torch.tensor(2.0)
        torch.save(whole, into / "broken" / f"{name}.bin")
    torch.save(torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1).state_dict(), into / "broken/stateless.bin")
    shutil.copyfile(into / "full/optimizer.bin", into / "full_hf/optimizer.bin")
    save_file(torch.load(into / "full/pytorch_model_fsdp.bin"), str(into / "full_hf/model.safetensors"))
    half = [torch.ones(2, 2, dtype=torch.bfloat16) for _ in range(3)]  # all in 16 bits, as a model that was loaded so is trained
    torch.distributed.checkpoint.save({"model": {"w": half[0]}, "optimizer": {"state": {"w": {
        "step": torch.tensor(1.0), "exp_avg": half[1], "exp_avg_sq": half[2]}}}}, checkpoint_id=into / "half", no_dist=True)
    weights = lambda x: {"w": torch.full((2, 2), x)}  # and averages of them, whose names come first
    state = {"state": {"w": {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2)}}}
    for name, kinds in (("averages", ("ema", "model")), ("twice", ("a", "b"))):
        torch.distributed.checkpoint.save({**{k: weights(float(i)) for i, k in enumerate(kinds)}, "optimizer": state}, checkpoint_id=into / name, no_dist=True)
    with open(into / "flat/.metadata", "rb") as f:
        metadata = pickle.load(f)
    for folder, wanted in (("pytorch_model_fsdp_0", lambda k: k.startswith("model.")),
                           ("optimizer_0", lambda k: k.startswith("optimizer.state.") or k.endswith(".weight_decay"))):
        (into / "trainer" / folder).mkdir(parents=True)
        part = pickle.loads(pickle.dumps(metadata))
        part.state_dict_metadata = {k: v for k, v in metadata.state_dict_metadata.items() if wanted(k)}
        part.storage_data = {k: v for k, v in metadata.storage_data.items() if wanted(k.fqn)}
        for v in part.state_dict_metadata.values():
            getattr(v, "chunks", []).reverse()  # in any order
        for v in part.storage_data.values():  # the items that are its own, in new files
            data = (into / "flat" / v.relative_path).read_bytes()[v.offset:v.offset + v.length]
            file = into / "trainer" / folder / v.relative_path
            v.offset = file.stat().st_size if file.exists() else 0
            with open(file, "ab") as f:
                f.write(data)
        (into / "trainer" / folder / ".metadata").write_bytes(pickle.dumps(part))
    shutil.rmtree(into / "flat")


def make_fsdp_experts():
    into = ROOT / "vectors/fsdp_experts"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", __file__, "--fsdp-experts", str(into)], check=True, env=env)


def make_experts():
    """A Mixtral whose folder has a tensor for each expert's matrix, by older names, and whose optimizer has one for all of a layer's, as transformers 5 has them."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    into = ROOT / "vectors/full_experts"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(
        **{**SIZES, "num_hidden_layers": 1, "intermediate_size": 5}, num_local_experts=2, num_experts_per_tok=2), experts_implementation="eager").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    expect, losses = {}, []
    for step in range(STEPS):
        if step == SAVED:
            for n, p in model.named_parameters():
                expect.update({n: p.detach().clone(), **{f"{n}.{m}": optimizer.state[p][m].clone() for m in ("exp_avg", "exp_avg_sq")}})
            torch.save(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))[1], into / "optimizer.bin")
            with tempfile.TemporaryDirectory() as work:
                model.save_pretrained(work)
                shutil.copyfile(pathlib.Path(work) / "model.safetensors", into / "model.safetensors")
        ids = torch.tensor([tokens(step, row) for row in range(3)])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    expect.update({f"end.{n}": p.detach() for n, p in model.named_parameters()})
    expect["losses"] = torch.tensor(losses)
    save_file({**expect, **load_file(into / "model.safetensors")}, str(into / "expect.safetensors"))


def make_turned():
    """What the optimizer of transformers 4 has of the experts in vectors/families/qwen3_vl_moe_images, whose matrices are (in, out) there as in the weights:
    twice these, and their half. All else was frozen."""
    import torch
    from safetensors.torch import load_file
    weights = {n: w.float() for n, w in load_file(ROOT / "vectors/families/qwen3_vl_moe_images/model.safetensors").items() if ".layers.1.mlp.experts." in n}
    state = {n: {"step": torch.tensor(4.0), "exp_avg": 2 * w, "exp_avg_sq": w / 2} for n, w in weights.items()}
    (ROOT / "vectors/fsdp/turned").mkdir(exist_ok=True)
    torch.save({"state": state, "param_groups": [{"params": list(state), "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}]},
               ROOT / "vectors/fsdp/turned/optimizer.bin")


def make_nvme():
    """stage3 as ZeRO-Infinity leaves it: what was on nvme is in files of its own, with padding, and empty in the ranks' files. DeepSpeed leaves
    arrays below 1 MiB where they are, so this is made of the other checkpoint: one sub-group of four stays."""
    import torch
    into = ROOT / "vectors/deepspeed"
    shutil.rmtree(into / "stage3_nvme", ignore_errors=True)
    shutil.copytree(into / "stage3", into / "stage3_nvme")
    for rank in range(CASES["stage3"][0]):
        file = into / f"stage3_nvme/global_step4/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = torch.load(file, weights_only=False)
        folder = file.parent / f"offloaded_tensors/rank{rank:02}"
        folder.mkdir(parents=True)
        optimizer = state["optimizer_state_dict"]

        def swap(tensor, name):
            raw = tensor.detach().numpy().tobytes()
            (folder / f"{name}.tensor.swp").write_bytes(raw + b"\xff" * (-len(raw) % 512))
            empty = torch.zeros(0)
            empty.ds_id = name
            return empty

        for g in (0, 1, 3):
            optimizer["fp32_flat_groups"][g] = swap(optimizer["fp32_flat_groups"][g], f"0_{g}")
            for m in ("exp_avg", "exp_avg_sq"):
                optimizer["optimizer_state_dict"]["state"][g][m] = swap(optimizer["optimizer_state_dict"]["state"][g][m], f"{m}-0_{g}")
        torch.save(state, file)


def make_torch():
    """One file, shards whose tensors are views of one storage, parameters in place of tensors, and what is refused."""
    import torch
    from safetensors.torch import save_file
    into = ROOT / "vectors/torch"
    shutil.rmtree(into, ignore_errors=True)
    model = make_model().to(torch.bfloat16)
    state = {k: v.detach().clone().contiguous() for k, v in model.state_dict().items()}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **SIZES}
    for name in ("one", "shards", "refused", "expect"):
        (into / name).mkdir(parents=True)
        (into / name / "config.json").write_text(json.dumps(config))
    save_file(state, str(into / "expect/model.safetensors"))
    torch.save(collections.OrderedDict(state), into / "one/pytorch_model.bin")
    flat, views, at = torch.cat([v.flatten() for v in state.values()]), {}, 0
    for k, v in state.items():
        views[k] = flat[at:at + v.numel()].view(v.shape)
        at += v.numel()
    names, where = list(state), {}
    for i in range(2):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        part = {k: torch.nn.Parameter(views[k], requires_grad=i == 0) for k in names[i::2]}
        torch.save(part, into / "shards" / file, pickle_protocol=2 + 2 * i)
        where.update({k: file for k in part})
    (into / "shards/pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    torch.save({"a": state["lm_head.weight"].t()}, into / "refused/transposed.bin")
    torch.save({"model": state["lm_head.weight"][:0], "epoch": 3, "inner": {"b": torch.zeros(1)}}, into / "refused/empty.bin")
    torch.save({"inner": {"b": torch.zeros(1)}}, into / "refused/nested.bin")
    torch.save({"a": torch.zeros(2, dtype=torch.complex64)}, into / "refused/complex.bin")
    torch.save({"a": torch.zeros(2)}, into / "refused/legacy.bin", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "--fsdp":
        fsdp(pathlib.Path(sys.argv[2]))
    elif len(sys.argv) > 2 and sys.argv[1] == "--fsdp-experts":
        fsdp_experts(pathlib.Path(sys.argv[2]))
    elif len(sys.argv) > 3:
        run(sys.argv[2], pathlib.Path(sys.argv[3]))
    elif len(sys.argv) > 1:
        train(sys.argv[1], pathlib.Path(sys.argv[2]))
    else:
        make_torch()
        make_llmc()
        make_fsdp()
        make_fsdp_experts()
        make_experts()
        make_turned()
        make_cases()
        make_nvme()
        make_runs()
