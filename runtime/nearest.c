/*
 * The nearest configuration that fits, for one that does not. Steps are tried in a fixed order, each on top of those
 * before it, until the plan fits: budgets above what the machine has left to auto, all that is offloaded off the device (ratio 1), weights off the device, records off the
 * device, activations off the device, weights to nvme, records to nvme, activations to nvme, gradients to nvme, gradients in bf16, chunks halved down to 64 Ki elements, tiles
 * halved down to 512 tokens, embeddings and heads in pieces, halved down to 2048 rows, smaller micro-batches (more of them: the batch stays), sequences shared by twice as many ranks (the batch stays, too), one micro-batch per pass, and where disks are limited weights and then
 * records back to host. Then every step that turns out not to be needed is taken back, first to last. None of these
 * changes what is computed but bf16 gradients, by one rounding, and the order of sums over tiles, pieces, micro-batches and ranks. Where nothing
 * fits and layers have experts, it is all tried once more, apart from these, with smaller batches. A lossy state
 * format is never among them; whether it would help is said separately. Only plans are made, on copies of the
 * configuration.
 */
#include "runtime_internal.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

enum { LEAST_CHUNK = 64 << 10, LEAST_TILE = 512, LEAST_PIECE = 2048, ROUNDS = 16 };

typedef enum change {
    HOST_AUTO,
    DEVICE_AUTO,
    ALL_OFF_DEVICE,
    PARAM_OFF_DEVICE,
    OPTIMIZER_OFF_DEVICE,
    ACTIVATIONS_OFF_DEVICE,
    PARAM_NVME,
    OPTIMIZER_NVME,
    ACTIVATIONS_NVME,
    GRADIENTS_NVME,
    GRAD_BF16,
    SMALLER_CHUNKS,
    SMALLER_TILES,
    SMALLER_PIECES,
    SMALLER_MICRO_BATCH,
    SHARED_SEQUENCES,
    ONE_PER_PASS,
    PARAM_HOST,
    OPTIMIZER_HOST,
    CHANGE_COUNT
} change;

static bool
to_nvme(spw_tier *tier, spw_path_list *paths, const spw_path_list *others)
{
    if (*tier == SPW_TIER_NVME)
        return false;
    *tier = SPW_TIER_NVME;
    if (paths->count == 0 && others->count > 0)
        *paths = *others;
    if (paths->count == 0) { /* the user chooses a better one */
        paths->count = 1;
        paths->weight[0] = 1;
        snprintf(paths->item[0], sizeof paths->item[0], ".");
    }
    return true;
}

static bool
back_to_host(spw_tier *tier)
{
    bool nvme = *tier == SPW_TIER_NVME;
    *tier = nvme ? SPW_TIER_HOST : *tier;
    return nvme;
}

/* What leaves the device needs a stage that allows it. */
static bool
raise_stage(spw_config *c)
{
    uint32_t least = c->zero.offload_param != SPW_TIER_DEVICE       ? 3
                     : c->zero.offload_optimizer != SPW_TIER_DEVICE ? 1
                                                                    : 0;
    c->zero.stage = c->zero.stage < least ? least : c->zero.stage;
    return true;
}

static bool
halve_tiles(spw_config *c, const spw_model *model)
{
    uint64_t tile = spw__tile_tokens(c, model);
    const uint64_t tokens = c->micro_batch * c->data.seq_length / spw_config_sharers(c);
    tile = (tile < tokens ? tile : tokens) / 2;
    if (tile < LEAST_TILE)
        return false;
    c->run.tile_tokens = tile;
    return true;
}

/* Gradients of pieces are added up in host memory, of several micro-batches or of both uses of tied embeddings: sums need fp32. */
static void
settle_sums(spw_config *c, const spw_model *model)
{
    const spw_param *embedding = &model->params[model->blocks[0].param_ids[0]];
    if (c->run.tile_vocab > 0 && (c->accumulation > 1 || (model->config.tied && !embedding->frozen)))
        c->run.grad_dtype = SPW_F32;
}

static bool
halve_pieces(spw_config *c, const spw_model *model)
{
    uint64_t rows = model->config.vocab, piece = c->run.tile_vocab;
    piece = (piece > 0 && piece < rows ? piece : rows) / 2;
    if (piece < LEAST_PIECE)
        return false;
    c->run.tile_vocab = piece;
    settle_sums(c, model);
    return true;
}

/* One change; false: there is nothing (more) of it to do. */
static bool
apply(spw_config *c, const spw_model *model, change what)
{
    uint64_t factor = 2;
    switch (what) {
    case HOST_AUTO:
    case DEVICE_AUTO: {
        uint64_t *budget = what == HOST_AUTO ? &c->run.host_memory : &c->run.device_memory;
        bool given = *budget != SPW_AUTO;
        *budget = SPW_AUTO;
        return given;
    }
    case ALL_OFF_DEVICE: {
        bool some = c->zero.offload_optimizer != SPW_TIER_DEVICE && c->zero.optimizer_ratio < 1;
        c->zero.optimizer_ratio = 1;
        return some;
    }
    case PARAM_OFF_DEVICE:
    case OPTIMIZER_OFF_DEVICE: {
        spw_tier *tier = what == PARAM_OFF_DEVICE ? &c->zero.offload_param : &c->zero.offload_optimizer;
        bool here = *tier == SPW_TIER_DEVICE;
        *tier = here ? SPW_TIER_HOST : *tier;
        return here && raise_stage(c);
    }
    case ACTIVATIONS_OFF_DEVICE:
        if (c->run.activations != SPW_TIER_DEVICE)
            return false;
        c->run.activations = SPW_TIER_COUNT;
        return true;
    case ACTIVATIONS_NVME:
        if ((c->run.activations != SPW_TIER_HOST && !c->run.cpu_checkpointing) || c->run.activations == SPW_TIER_NVME ||
            c->zero.param_path.count + c->zero.optimizer_path.count == 0)
            return false;
        c->run.activations = SPW_TIER_NVME;
        return true;
    case PARAM_NVME:
        return to_nvme(&c->zero.offload_param, &c->zero.param_path, &c->zero.optimizer_path) && raise_stage(c);
    case OPTIMIZER_NVME:
        return to_nvme(&c->zero.offload_optimizer, &c->zero.optimizer_path, &c->zero.param_path) && raise_stage(c);
    case GRADIENTS_NVME:
        if (c->zero.offload_optimizer != SPW_TIER_NVME || strcmp(c->run.gradients, "host") != 0 ||
            (c->run.micro_batches_per_pass > 0 && c->run.micro_batches_per_pass < c->accumulation))
            return false;
        snprintf(c->run.gradients, sizeof c->run.gradients, "nvme");
        return true;
    case GRAD_BF16:
        if (c->run.grad_dtype == SPW_BF16 ||
            (c->run.micro_batches_per_pass > 0 && c->run.micro_batches_per_pass < c->accumulation))
            return false; /* sums over passes need fp32 */
        c->run.grad_dtype = SPW_BF16;
        return true;
    case SMALLER_CHUNKS:
        if (c->run.chunk_elems / 2 < LEAST_CHUNK)
            return false;
        c->run.chunk_elems = c->run.chunk_elems / 2 / 4096 * 4096;
        return true;
    case SMALLER_TILES: return halve_tiles(c, model);
    case SMALLER_PIECES: return halve_pieces(c, model);
    case SMALLER_MICRO_BATCH:
        while (factor <= c->micro_batch && c->micro_batch % factor != 0)
            factor++;
        if (c->micro_batch == 1)
            return false;
        c->micro_batch /= factor;
        c->accumulation *= factor;
        settle_sums(c, model);
        return true;
    case SHARED_SEQUENCES: /* whether this model's can be is the engine's to say */
        while (factor < c->run.ranks && c->run.ranks / spw_config_sharers(c) % factor != 0)
            factor++;
        if (c->micro_batch > 1 || spw_config_sharers(c) >= c->run.ranks)
            return false;
        c->sequence_ranks = (uint32_t)(spw_config_sharers(c) * factor);
        c->accumulation *= factor;
        settle_sums(c, model);
        return true;
    case ONE_PER_PASS:
        if (c->accumulation == 1 || c->run.micro_batches_per_pass == 1)
            return false;
        c->run.micro_batches_per_pass = 1;
        c->run.grad_dtype = SPW_F32; /* sums over passes need it */
        return true;
    case PARAM_HOST: return back_to_host(&c->zero.offload_param);
    case OPTIMIZER_HOST: return back_to_host(&c->zero.offload_optimizer);
    default: return false;
    }
}

spw_status
spw__try_plan(const spw_engine_options *options, const spw_config *c, spw_plan *plan)
{
    spw_engine_options o = *options;
    spw_engine *e = NULL;
    spw_error refused = {0};
    spw_status st;
    memset(plan, 0, sizeof *plan);
    o.config = c;
    o.plan_only = o.unexplained = true;
    o.plan_out = plan;
    st = spw_engine_create(&e, &o, &refused);
    spw_engine_destroy(e);
    return st;
}

/* False: the configuration is refused for another reason. *lack_out says what it has too little of. */
static bool
try_plan(const spw_engine_options *options, const spw_config *c, spw_plan *plan, spw_lack *lack_out)
{
    const spw_status st = spw__try_plan(options, c, plan);
    *lack_out = plan->lack;
    return st == SPW_OK || st == SPW_ENOFIT;
}

/* Which changes can help with what is lacking. */
static bool
helps(change what, spw_lack lack)
{
    switch (what) {
    case HOST_AUTO:
    case DEVICE_AUTO: return lack == SPW_LACK_ROOM;
    case ALL_OFF_DEVICE:
    case PARAM_OFF_DEVICE:
    case OPTIMIZER_OFF_DEVICE:
    case ACTIVATIONS_OFF_DEVICE: return lack == SPW_LACK_DEVICE;
    case SMALLER_TILES:
    case SMALLER_PIECES:
    case SMALLER_MICRO_BATCH: /* the device's memory may be the machine's */
    case SHARED_SEQUENCES:
    case ONE_PER_PASS: return lack == SPW_LACK_DEVICE || lack == SPW_LACK_ROOM;
    case PARAM_HOST:
    case OPTIMIZER_HOST: return lack == SPW_LACK_DISK;
    default: return lack == SPW_LACK_HOST || lack == SPW_LACK_ROOM;
    }
}

typedef struct search {
    spw_engine_options *options;
    const spw_config *from;
    spw_config *config, *trial, *seen;
    spw_plan *plan;
    change done[CHANGE_COUNT * ROUNDS];
    uint32_t done_count;
} search;

/* Makes trial from where it began and the changes that are still in; true: it fits. */
static bool
fits(search *s)
{
    spw_lack lack;
    *s->trial = *s->from;
    for (uint32_t i = 0; i < s->done_count; i++)
        (void)apply(s->trial, s->options->model, s->done[i]);
    return try_plan(s->options, s->trial, s->plan, &lack) && lack == SPW_LACK_NOTHING;
}

/*
 * Changes it until it fits, as far as that can be told without what disks hold. What lacks room on disks and in host memory goes back and forth: once a
 * configuration comes again that was there behind the 1st, 2nd, 4th, 8th change and so on, with as much missing, no other will come (Brent 1980).
 */
static bool
reach(search *s, const spw_config *from)
{
    spw_lack lack, seen_lack = SPW_LACK_NOTHING;
    uint64_t least, seen_least = 0;
    s->options->fit_only = true;
    s->from = from;
    *s->config = *from;
    s->done_count = 0;
    if (!try_plan(s->options, s->config, s->plan, &lack))
        return false;
    least = s->plan->least_bytes;
    for (uint32_t round = 0; lack != SPW_LACK_NOTHING && round < CHANGE_COUNT * ROUNDS; round++) {
        change what = 0;
        spw_lack left = lack;
        while (what < CHANGE_COUNT) { /* one that the device refuses may be possible after another */
            *s->trial = *s->config;
            if (helps(what, lack) && apply(s->trial, s->options->model, what) &&
                try_plan(s->options, s->trial, s->plan, &left) &&
                (what != SMALLER_CHUNKS || left != lack || s->plan->least_bytes <= least))
                break; /* tables of very many chunks take more than smaller slots save */
            what++;
        }
        if (what == CHANGE_COUNT || s->done_count == sizeof s->done / sizeof s->done[0])
            return false;
        *s->config = *s->trial;
        s->done[s->done_count++] = what;
        lack = left;
        least = s->plan->least_bytes;
        if (lack != SPW_LACK_NOTHING && lack == seen_lack && least == seen_least &&
            memcmp(s->config, s->seen, sizeof *s->config) == 0)
            return false;
        if ((s->done_count & (s->done_count - 1)) == 0) {
            *s->seen = *s->config;
            seen_lack = lack;
            seen_least = least;
        }
    }
    return lack == SPW_LACK_NOTHING;
}

static bool
find(search *s, const spw_config *from)
{
    if (!reach(s, from))
        return false;
    for (uint32_t i = 0; i < s->done_count;) { /* take back what is not needed */
        change what = s->done[i];
        memmove(&s->done[i], &s->done[i + 1], (s->done_count - i - 1) * sizeof s->done[0]);
        s->done_count--;
        if (fits(s))
            continue;
        memmove(&s->done[i + 1], &s->done[i], (s->done_count - i) * sizeof s->done[0]);
        s->done[i++] = what;
        s->done_count++;
    }
    s->options->fit_only = false; /* where state lies decides what disks hold */
    return fits(s);
}

/* ---------------------------------------------------------------- as --set takes it */

static void SPW_PRINTF(2, 3) say(spw_suggestion *out, const char *fmt, ...)
{
    va_list args;
    if (out->count == sizeof out->set / sizeof out->set[0])
        return;
    va_start(args, fmt);
    vsnprintf(out->set[out->count++], sizeof out->set[0], fmt, args);
    va_end(args);
}

static void
say_tier(spw_suggestion *out, const char *key, spw_tier old_tier, spw_tier tier, const spw_path_list *old_paths,
         const spw_path_list *paths)
{
    if (tier == old_tier)
        return;
    say(out, "zero_optimization.%s.device=%s", key, tier == SPW_TIER_HOST ? "cpu" : "nvme");
    if (tier == SPW_TIER_NVME && old_paths->count == 0) {
        json_t *list = json_array();
        char *text;
        for (uint32_t i = 0; i < paths->count; i++)
            json_array_append_new(list, json_string(paths->item[i]));
        text = json_dumps(list, JSON_COMPACT);
        if (text != NULL)
            say(out, "zero_optimization.%s.nvme_path=%s", key, text);
        free(text);
        json_decref(list);
    }
}

static void
say_difference(const spw_config *a, const spw_config *b, spw_suggestion *out)
{
    if (a->run.host_memory != b->run.host_memory)
        say(out, "spillway.host_memory=auto");
    if (a->run.device_memory != b->run.device_memory)
        say(out, "spillway.device_memory=auto");
    if (a->zero.stage < b->zero.stage)
        say(out, "zero_optimization.stage=%u", b->zero.stage);
    say_tier(out, "offload_param", a->zero.offload_param, b->zero.offload_param, &a->zero.param_path,
             &b->zero.param_path);
    say_tier(out, "offload_optimizer", a->zero.offload_optimizer, b->zero.offload_optimizer, &a->zero.optimizer_path,
             &b->zero.optimizer_path);
    if (a->zero.optimizer_ratio != b->zero.optimizer_ratio)
        say(out, "zero_optimization.offload_optimizer.ratio=%g", b->zero.optimizer_ratio);
    if (a->run.activations != b->run.activations)
        say(out, "spillway.activations=%s", b->run.activations == SPW_TIER_NVME ? "nvme" : "auto");
    if (strcmp(a->run.gradients, b->run.gradients) != 0)
        say(out, "spillway.gradients=%s", b->run.gradients);
    if (a->run.grad_dtype != b->run.grad_dtype)
        say(out, "spillway.grad_dtype=%s", spw_dtype_name(b->run.grad_dtype));
    if (a->run.chunk_elems != b->run.chunk_elems)
        say(out, "spillway.chunk_elems=%llu", (unsigned long long)b->run.chunk_elems);
    if (a->run.tile_tokens != b->run.tile_tokens)
        say(out, "spillway.tile_tokens=%llu", (unsigned long long)b->run.tile_tokens);
    if (a->run.tile_vocab != b->run.tile_vocab)
        say(out, "spillway.tile_vocab=%llu", (unsigned long long)b->run.tile_vocab);
    if (a->train_batch_size != b->train_batch_size)
        say(out, "train_batch_size=%llu", (unsigned long long)b->train_batch_size);
    if (spw_config_sharers(a) != spw_config_sharers(b))
        say(out, "sequence_parallel_size=%u", b->sequence_ranks);
    if (a->micro_batch != b->micro_batch || a->accumulation != b->accumulation) {
        say(out, "train_micro_batch_size_per_gpu=%llu", (unsigned long long)b->micro_batch);
        say(out, "gradient_accumulation_steps=%llu", (unsigned long long)b->accumulation);
    }
    if (a->run.micro_batches_per_pass != b->run.micro_batches_per_pass)
        say(out, "spillway.micro_batches_per_pass=%llu", (unsigned long long)b->run.micro_batches_per_pass);
}

/*
 * Where what is held of all micro-batches, or sums over them, find no room: of batches in one micro-batch the largest that fits, halved and halved
 * again. It is another training, which is for the user to want: the suggestion says so.
 */
static bool
find_smaller_batch(search *s, spw_config *c)
{
    const uint64_t ranks = (c->run.ranks > 0 ? c->run.ranks : 1) / spw_config_sharers(c);
    const uint64_t all = c->micro_batch * c->accumulation;
    c->accumulation = c->micro_batch = 1;
    c->train_batch_size = ranks;
    if (s->options->model->config.experts == 0 || all == 1 || !reach(s, c))
        return false;
    for (c->micro_batch = all / 2; c->micro_batch > 0; c->micro_batch /= 2) {
        c->train_batch_size = ranks * c->micro_batch;
        if (find(s, c))
            return true;
    }
    return false;
}

spw_status
spw_plan_nearest(const spw_engine_options *options, spw_suggestion *out, spw_error *err)
{
    spw_engine_options own = *options;
    search s = {.options = &own,
                .config = spw_mem_zalloc(sizeof *s.config),
                .trial = spw_mem_zalloc(sizeof *s.trial),
                .seen = spw_mem_zalloc(sizeof *s.seen),
                .plan = spw_mem_zalloc(sizeof *s.plan)};
    spw_config *other = spw_mem_zalloc(sizeof *other);
    spw_status st = SPW_OK;
    memset(out, 0, sizeof *out);
    if (s.config == NULL || s.trial == NULL || s.seen == NULL || s.plan == NULL || other == NULL) {
        st = SPW_RAISE(err, SPW_ENOMEM, "search for a configuration that fits");
    } else {
        uint64_t process = own.process_bytes > 0 ? own.process_bytes : spw_round_up(spw_process_rss_bytes(), 1 << 20);
        own.process_bytes = process + process / 16 + (1 << 20); /* the process that follows may be a little larger */
        own.uncounted = true;
        out->found = find(&s, options->config);
        if (out->found) {
            say_difference(options->config, s.trial, out);
        } else {
            *other = *options->config;
            if (find_smaller_batch(&s, other)) {
                out->batch = other->train_batch_size;
                say_difference(options->config, s.trial, out);
            }
            *other = *options->config;
            other->run.state_format = SPW_STATE_SPLIT24_INT8;
            out->lossy_would = find(&s, other);
        }
    }
    spw_mem_free(s.config);
    spw_mem_free(s.trial);
    spw_mem_free(s.seen);
    spw_mem_free(s.plan);
    spw_mem_free(other);
    return st;
}
