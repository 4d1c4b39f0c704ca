/*
 * What the planner decided by itself and why, as lines for people: one for each value that the configuration left open.
 * Reads the finished plan; changes nothing but its list of decisions.
 */
#include "plan_internal.h"
#include <stdarg.h>
#include <stdio.h>

static void SPW_PRINTF(4, 5) decide(spw_plan *p, const char *name, const char *value, const char *reason, ...)
{
    spw_decision *d = &p->decisions[p->decision_count];
    va_list args;
    if (p->decision_count == SPW_DECISIONS_MAX)
        return;
    p->decision_count++;
    snprintf(d->name, sizeof d->name, "%s", name);
    snprintf(d->value, sizeof d->value, "%s", value);
    va_start(args, reason);
    vsnprintf(d->reason, sizeof d->reason, reason, args);
    va_end(args);
}

static const char *
number(char *buf, size_t bytes, uint64_t n)
{
    snprintf(buf, bytes, "%llu", (unsigned long long)n);
    return buf;
}

static void
explain_host(spw_plan *p, const plan_input *in)
{
    char value[64], bytes[32];
    if (p->host_budget == SPW_AUTO)
        decide(p, "spillway.host_memory", spw_format_bytes(value, sizeof value, p->host_bytes),
               "auto: what the process, gradients, slots and everything on host need, and %s",
               p->spare_host > 0 ? "logs to take updates back by, in at most half of what is left" : "no more");
    for (int records = 0; records < 2; records++) {
        const spw_config *c = in->config;
        spw_tier asked = records ? c->zero.offload_optimizer : c->zero.offload_param;
        uint32_t slots = records ? p->record_slots : p->weight_slots, here = 0, all = 0;
        uint64_t host = records ? p->record_host : p->weight_host;
        const char *why = "as many as keep reads, updates and writes going at once";
        if (asked != SPW_TIER_NVME || (records && in->inference))
            continue;
        for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
            const spw_store_chunk *chunk = &in->layout->chunks[i];
            if (records && !in->layout->units[chunk->unit_idx].trainable)
                continue;
            here += (records ? chunk->record_tier : chunk->weight_tier) == SPW_TIER_HOST;
            all++;
        }
        if (p->host_budget != SPW_AUTO) {
            snprintf(value, sizeof value, "%u of %u chunks on host", here, all);
            decide(p, records ? "optimizer records" : "weights", value,
                   here == all ? "%s: spillway.host_memory holds all of them"
                   : here > 0  ? "%s: spillway.host_memory holds no more of them after gradients and slots"
                              : "%s: spillway.host_memory leaves no room for one after gradients, slots and what saves "
                                "more",
                   spw_format_bytes(bytes, sizeof bytes, host));
        }
        if ((records ? c->run.record_slots : c->run.weight_slots) > 0)
            continue;
        if (slots == 0) {
            decide(p, records ? "spillway.record_slots" : "spillway.weight_slots", "0",
                   "nothing of this kind is left on nvme");
            continue;
        }
        if (records ? c->zero.optimizer_buffer_count > 0 : c->zero.param_buffer_count > 0)
            why = records ? "offload_optimizer.buffer_count" : "offload_param.buffer_count x buffer_size";
        else if (!records && c->zero.max_in_cpu > 0 && c->zero.max_in_cpu != SPW_AUTO)
            why = "offload_param.max_in_cpu, at least as many as keep transfers going";
        decide(p, records ? "spillway.record_slots" : "spillway.weight_slots", number(value, sizeof value, slots),
               "%s%s, of %s each", why, p->host_budget != SPW_AUTO ? ", within spillway.host_memory" : "",
               spw_format_bytes(bytes, sizeof bytes, records ? spw__plan_slot_record(in) : spw__plan_slot_weights(in)));
    }
}

static void
explain_activations(spw_plan *p, const plan_input *in)
{
    const uint32_t *n = p->activation_count;
    char value[64] = "";
    size_t at = 0;
    for (int t = 0; t < SPW_TIER_COUNT; t++) {
        if (n[t] > 0)
            at += (size_t)snprintf(value + at, sizeof value - at, "%s%u %s", at > 0 ? ", " : "", n[t],
                                   spw_tier_name((spw_tier)t));
    }
    if (in->config->run.activations != SPW_TIER_COUNT || at == 0)
        return;
    decide(p, "spillway.activations", value, "%s",
           in->config->run.cpu_checkpointing          ? "activation_checkpointing.cpu_checkpointing"
           : n[SPW_TIER_HOST] + n[SPW_TIER_NVME] == 0 ? "the device holds all checkpoints"
           : n[SPW_TIER_NVME] > 0
               ? "what the device has no room for: those needed last leave it, the last of them to nvme"
               : "what the device has no room for: those needed last go to host memory");
}

static void
explain_zeropp(spw_plan *p, const plan_input *in)
{
    const spw_config *c = in->config;
    char value[64];
    bool weights = c->zero.quantized_weights;
    if (c->zero.stage == 3 && in->replicas > 1) {
        snprintf(value, sizeof value, "groups of %u", in->layout->parts);
        decide(
            p, "ranks", value,
            "zero_optimization.mics_shard_size: a rank holds 1/%u of all state, as %u in all do; weights come from the "
            "group, gradients are summed in groups and then over them",
            in->layout->parts, in->replicas);
    }
    if (in->layout->parts == 1 || c->zero.stage < 3)
        return;
    if (p->kept_host > 0)
        decide(p, "kept gathered weights", spw_format_bytes(value, sizeof value, p->kept_host),
               "zero_optimization.zero_hpz_partition_size %u: so many ranks of a host have all units among them, and "
               "gather those again that have not changed without other hosts and without swap",
               c->zero.hpz_partition_size);
    if (in->coded_grads)
        decide(p, "gradients between hosts", "4-bit codes",
               "zero_optimization.zero_quantized_gradients: inside a host they are summed in fp32, as without it");
    if (weights || c->zero.quantized_frozen)
        decide(p, weights ? "gathering weights" : "gathering frozen weights", "8-bit codes",
               "zero_optimization.%s: 1.03 bytes per parameter come from each other rank's part, not %u",
               weights ? "zero_quantized_weights" : "zero_quantized_nontrainable_weights", in->compute_bytes);
}

/* "4", or "8 and 4": of whose codes, in the order that they come in. */
static void
say_bits(char *out, size_t size, const spw_layout *l)
{
    uint32_t seen = 0;
    for (uint32_t u = 0; u < l->unit_count; u++) {
        const uint32_t bits = spw_codes_bits(l->units[u].form), at = (uint32_t)strlen(out);
        if (bits > 0 && (seen >> bits & 1u) == 0)
            snprintf(out + at, size - at, "%s%u", seen > 0 ? " and " : "", bits);
        seen |= bits > 0 ? 1u << bits : 0;
    }
}

static void
explain_codes(spw_plan *p, const plan_input *in)
{
    const spw_layout *l = in->layout;
    uint64_t elems = 0, bytes = 0, blocks = 0;
    bool published = false;
    char value[64], bits[32] = "";
    say_bits(bits, sizeof bits, l);
    for (uint32_t u = 0; u < l->unit_count; u++) {
        const spw_quant form = l->units[u].form;
        if (form == SPW_QUANT_NONE)
            continue;
        published = published || spw_codes_group(form) > 0;
        elems += l->units[u].elems;
        bytes += spw_store_weight_bytes(l->units[u].elems, 0, form);
        blocks += l->units[u].elems / SPW_QUANT_BLOCK * spw_codes_block_bytes(form);
    }
    if (elems > 0)
        decide(p, "spillway.frozen_codes", spw_format_bytes(value, sizeof value, bytes),
               "frozen matrices as codes of %s bits%s: %.2f bytes per parameter in host memory, on disk and over the "
               "links, not %u",
               bits, published ? ", those that model.path has as such and just so (others are numbers)" : "",
               (double)blocks / (double)elems, in->weight_bytes);
}

/* Why updates wait for the norm; NULL: there is nothing to say about it. */
static const char *
why_not_ahead(const spw_plan *p, const plan_input *in)
{
    if (p->record_nvme == 0 && (!in->ahead || in->device_in_host || p->record_host == 0))
        return NULL; /* of a host that computes too nobody expects it */
    if (p->record_nvme == 0)
        return "no host memory is left for what takes them back";
    return in->config->run.write_budget > 0 ? "spillway.write_budget, and nothing is written in vain"
                                            : "no room for second places of state on nvme";
}

static void
explain_ahead(spw_plan *p, const plan_input *in)
{
    const spw_config *c = in->config;
    const char *why = why_not_ahead(p, in);
    const double all = (double)(p->record_nvme + p->record_host), there = (double)(p->record_nvme + p->spared_host);
    char value[64], bytes[32], share[128] = "", undo[128] = "";
    bool waits = c->gradient_clipping > 0 || c->bf16_check_overflow || c->fp16;
    if (p->late) {
        decide(p, "spillway.delayed_update", "yes",
               "from update %llu on each is made beside the next backward pass: what it computes differs from what "
               "updates at once compute",
               (unsigned long long)c->run.delayed_update + 1);
        return;
    }
    if (in->inference || !waits || strcmp(c->run.update_ahead, "never") == 0 || (!p->ahead && why == NULL))
        return;
    if (!p->ahead) {
        decide(p, "spillway.update_ahead", "no", "%s: updates wait for the gradient's norm", why);
        return;
    }
    if (there < all)
        snprintf(share, sizeof share, " for %.0f %% of the records%s", 100 * there / all,
                 p->host_budget == SPW_AUTO ? " (half of the memory that is left; spillway.host_memory gives more)"
                                            : "");
    if (p->undo_write > 0)
        snprintf(undo, sizeof undo, "; weights of before, up to %s a step, are written too",
                 spw_format_bytes(bytes, sizeof bytes, p->undo_write));
    decide(p, "spillway.update_ahead", spw_format_bytes(value, sizeof value, p->spare_nvme + p->spare_host),
           "%s%s: updates begin before the norm is known, and are taken back if the step clips%s%s",
           p->spare_host == 0    ? "second places on nvme"
           : p->record_nvme == 0 ? "logs in host memory"
                                 : "second places on nvme, and logs in host memory",
           share,
           p->grad_nvme > 0 ? "; gradients that would wait on nvme do not, and then all passes are made again" : "",
           undo);
}

static void
explain_device(spw_plan *p, const plan_input *in)
{
    char value[64], asked[32];
    bool all = p->cache_device >= spw__layout_all_on_device(in->layout) * in->compute_bytes;
    if (p->device_budget == SPW_AUTO)
        decide(p, "spillway.device_memory", spw_format_bytes(value, sizeof value, p->device_bytes),
               "auto: activations and working memory of this batch, and the gathered units below");
    if (in->device_asked > 0)
        decide(p, "spillway.device_memory", spw_format_bytes(value, sizeof value, p->device_budget),
               "what the device has left: %s are asked for", spw_format_bytes(asked, sizeof asked, in->device_asked));
    decide(p, "gathered units", spw_format_bytes(value, sizeof value, p->cache_device), "%s",
           p->cache_device == 0           ? "none: weights are used where they lie"
           : all                          ? "all units fit and stay gathered until they are updated"
           : p->device_budget != SPW_AUTO ? "what spillway.device_memory or max_live_parameters leave"
           : p->cache_device == 3 * in->largest_block_bytes
               ? "three times the largest block: the one in use, the next and the last"
               : "what is left of the device, or max_live_parameters leave");
    if (p->single_grad)
        decide(p, "gradients on the device", "one at a time",
               "device memory does not hold a second buffer: each leaves before the next block's is begun");
}

static void
explain_updates(spw_plan *p, const plan_input *in)
{
    char value[64];
    double share = p->trained > 0 ? (double)p->trained_device / (double)p->trained : 0;
    if (share == 1)
        decide(p, "updates", "on the device", "all state is there%s: no gradient and no record crosses the link%s",
               in->fills ? ", which has room for it (spillway.fill_device)" : "",
               spw__plan_whole(in).d2h > 0 ? ", but for those of Muon's matrices of which two ranks have a part" : "");
    snprintf(value, sizeof value, "%.0f %% on the device", 100 * share);
    if (share > 0 && share < 1)
        decide(p, "updates", value, "%s%s: state of the first units is there, the host updates the others meanwhile",
               !in->fills                                         ? "zero_optimization.offload_optimizer.ratio"
               : strcmp(in->config->run.fill_device, "auto") != 0 ? "spillway.fill_device"
               : in->given    ? "spillway.fill_device auto, the shortest step by the rates above"
               : in->measured ? "spillway.fill_device auto, the shortest step by rates measured here"
                              : "spillway.fill_device auto, the shortest step by estimate",
               in->displaces ? ", though weights then come more often" : "");
}

/* What DeepSpeed does where a key is missing, and this does not. */
static void
explain_missing(spw_plan *p, const plan_input *in)
{
    const spw_config *c = in->config;
    if (c->gradient_clipping <= 0 && !in->inference)
        decide(p, "gradient_clipping", "none",
               "0, which it also is where the key is missing: gradients are not clipped (DeepSpeed 0.19.8 takes 1.0 "
               "then)");
    if (c->bf16 && c->gradient_clipping <= 0 && !c->bf16_check_overflow && !in->inference)
        decide(p, "bf16.check_grad_overflow", "false",
               "which it also is where the key is missing: unclipped, a gradient that is not finite ends the run "
               "(DeepSpeed 0.19.8 skips such a step then)");
}

static void
explain_state(spw_plan *p, const plan_input *in)
{
    char value[64], bytes[32];
    if (p->grad_nvme > 0)
        decide(p, "spillway.gradients", spw_format_bytes(value, sizeof value, p->grad_nvme),
               "%s%s on nvme for their updates, through %s; %s stay in host memory",
               strcmp(in->config->run.gradients, "auto") == 0 ? "auto, host memory does not hold them: " : "",
               p->ahead ? "after a step that clipped wait" : "wait",
               p->grad_windows == 1 ? "one window, there is no room for two" : "two windows",
               spw_format_bytes(bytes, sizeof bytes, p->grad_host));
    if (in->gather_all)
        decide(p, "weights", "with their records",
               "updates run where the records are; the device has the gathered units above");
    if (in->layout->whole)
        decide(p, "optimizer.type", "Muon",
               "matrices between embeddings and head, %.0f %% of the parameters, keep one moment, and the device makes "
               "it orthogonal in %.2g operations a step; the others take AdamW",
               100 * (double)(spw__plan_whole(in).own * in->layout->parts) / (double)in->layout->params,
               in->orthogonal_flops);
}

/* What is computed again, and what comes in turns for it. */
static void
explain_again(spw_plan *p, const plan_input *in)
{
    char value[64];
    const spw_config *c = in->config;
    if (p->tape_count > 0)
        decide(p, "spillway.recompute", spw_format_bytes(value, sizeof value, p->tapes_device),
               "device memory that is left keeps %.0f %% of what lies between checkpoints, which need not be computed "
               "again",
               100.0 * p->tape_count / in->activation_slots_used / in->activation_micros);
    if (c->run.expert_turns == 0 && in->expert_turns > 1)
        decide(p, "spillway.expert_turns", number(value, sizeof value, in->expert_turns),
               "the device has no room for all experts of a layer at once%s",
               in->micro_batches > 1 && in->activation_micros == 1
                   ? "; micro-batches come one by one, each with all weights: larger ones bring them less often"
               : in->activation_micros > 1 ? "; each turn serves all micro-batches of a pass"
                                           : "");
    if (in->read_kept > 0)
        decide(p, "spillway.recompute", c->run.recompute,
               "what experts read in %u layers is one more checkpoint: what lies before them is computed again once, "
               "not twice",
               in->read_kept);
}

static void
explain_passes(spw_plan *p, const plan_input *in)
{
    char value[64], bytes[32];
    const spw_config *c = in->config;
    if (c->run.micro_batches_per_pass == 0 && in->expert_turns > 1 && in->passes > 1 && in->activation_micros > 1)
        decide(p, "spillway.micro_batches_per_pass", number(value, sizeof value, in->activation_micros),
               "weights come once per pass; what is held of more micro-batches takes longer to move, or has no room");
    if (c->run.micro_batches_per_pass == 0 && in->passes > 1 && in->expert_turns <= 1)
        decide(
            p, "spillway.micro_batches_per_pass", number(value, sizeof value, in->activation_micros), "%s",
            in->holds
                ? "the device holds all weights, and the sums of gradients between passes, so another pass moves "
                  "nothing, and activations are those of one pass"
                : "all state is on the device, so another pass fetches nothing, and activations are those of one pass");
    if (c->run.micro_batches_per_pass != 0 && in->holds)
        decide(p, "gradients", "on the device", "it holds their sums between passes, so they leave once a step");
    if (c->run.micro_batches_per_pass == 0 && in->micro_batches > 1 && in->passes == 1)
        decide(
            p, "spillway.micro_batches_per_pass", number(value, sizeof value, in->micro_batches),
            "all of them: weights are fetched once per pass however many there are%s; checkpoints of activations "
            "take %s",
            in->in_pieces ? ", but for pieces of the vocabulary, which come once for each (spillway.tile_vocab)" : "",
            spw_format_bytes(bytes, sizeof bytes, p->activations_device + p->activations_host + p->activations_nvme));
}

void
spw__plan_explain(spw_plan *p, const plan_input *in)
{
    const spw_config *c = in->config;
    char value[64];
    uint64_t chunk = spw__plan_largest_chunk(in->layout), all = 0;
    p->decision_count = 0;
    explain_host(p, in);
    explain_device(p, in);
    explain_updates(p, in);
    explain_missing(p, in);
    explain_state(p, in);
    explain_ahead(p, in);
    explain_zeropp(p, in);
    explain_codes(p, in);
    explain_activations(p, in);
    explain_again(p, in);
    explain_passes(p, in);
    if (chunk < c->run.chunk_elems)
        decide(p, "spillway.chunk_elems", number(value, sizeof value, chunk), "%s",
               c->zero.sub_group_size > 0 && c->zero.sub_group_size < c->run.chunk_elems &&
                       chunk + 4096 > c->zero.sub_group_size
                   ? "zero_optimization.sub_group_size bounds it"
                   : "no unit has more elements");
    if (c->run.optimizer_threads == 0)
        decide(p, "spillway.optimizer_threads", number(value, sizeof value, in->optimizer_threads),
               "one per CPU that this process may use");
    for (uint32_t i = 0; i < p->path_count; i++)
        all += p->path_bytes[i];
    for (uint32_t i = 0; p->path_count > 1 && all > 0 && i < p->path_count; i++) {
        snprintf(value, sizeof value, "%.1f %%", 100 * (double)p->path_bytes[i] / (double)all);
        decide(p, p->paths[i], value, "weight %g%s", p->path_weight[i],
               p->path_limit[i] > 0 ? ", within its limit (bytes)" : "");
    }
    for (uint32_t i = 0; i < p->path_count; i++) {
        if (p->path_ranks[i] < 2)
            continue;
        snprintf(value, sizeof value, "1/%u of the disk", p->path_ranks[i]);
        decide(p, p->paths[i], value, "so many ranks of this host swap to it, and share what it reads and writes");
    }
}
