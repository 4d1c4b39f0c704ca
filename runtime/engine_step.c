/*
 * A training step from the first micro-batch to the decision: passes over the chain, what they took, the norm, and go or
 * skip. It waits for a unit by generation, never for "the optimizer": updates of this step run on into the next forward pass.
 */
#include "engine_internal.h"
#include "spw_data.h"
#include <math.h>

/* ---------------------------------------------------------------- sums that decide */

static const float *
bring_losses(const spw_engine *e, uint32_t micro_batches)
{
    if (e->host_addressable)
        return e->losses;
    spw_gpu_read_bytes(e->compute, e->losses_host, e->losses, micro_batches * e->rows * sizeof *e->losses);
    return e->losses_host;
}

/* Element order, fp64 partials per 4096: the same whatever the micro-batches' grouping. */
static double
sum_losses(const spw_engine *e, uint32_t micro_batches)
{
    const float *losses = bring_losses(e, micro_batches);
    double total = 0;
    uint64_t n = micro_batches * e->rows;
    for (uint64_t first = 0; first < n; first += 4096) {
        double part = 0;
        for (uint64_t i = first; i < n && i < first + 4096; i++)
            part += (double)losses[i];
        total += part;
    }
    return total;
}

/* Of this rank's pairs: the sum of losses, of both rewards, and the number of pairs whose chosen answer has the larger one. */
enum { PREFERRED_VALUES = 4 };

static void
sum_pairs(const spw_engine *e, uint32_t micro_batches, const int32_t *targets, double sums[PREFERRED_VALUES])
{
    const float *losses = bring_losses(e, micro_batches);
    spw_pair_means sum = {.pairs = 0};
    for (uint32_t m = 0; m < micro_batches; m++)
        spw__pairs_add(&sum, e->pairs_host + m * spw__pairs_max(e), e->pair_counts[m], &e->preference,
                       losses + m * e->rows, targets + m * e->rows);
    sums[0] = sum.loss;
    sums[1] = sum.chosen;
    sums[2] = sum.rejected;
    sums[3] = sum.right;
}

/* Of this rank. Returns how many values these are. */
static uint32_t
sum_own(const spw_engine *e, uint32_t micro_batches, const int32_t *targets, double sums[PREFERRED_VALUES])
{
    if (e->prefers)
        sum_pairs(e, micro_batches, targets, sums);
    else
        sums[0] = sum_losses(e, micro_batches);
    return e->prefers ? PREFERRED_VALUES : 1;
}

/* Means, of sums over all ranks. */
static void
note_preferred(spw_engine *e, const double sums[PREFERRED_VALUES])
{
    const double n = (double)e->target_count;
    e->preferred =
        (spw_pair_means){.pairs = e->target_count, .loss = NAN, .chosen = NAN, .rejected = NAN, .right = NAN};
    if (e->target_count > 0)
        e->preferred = (spw_pair_means){.pairs = e->target_count,
                                        .loss = sums[0] / n,
                                        .chosen = sums[1] / n,
                                        .rejected = sums[2] / n,
                                        .right = sums[3] / n};
}

/* The loss, of sums over all ranks. Of nothing there is none: 0 would look like one that is learned. */
static double
mean_of(spw_engine *e, const double *sums)
{
    if (e->prefers)
        note_preferred(e, sums);
    return e->target_count > 0 ? sums[0] / (double)e->target_count : NAN;
}

/* In the thread that brought the gradient: for a billion elements adding up takes milliseconds, which at the step's end all would wait for. */
void
spw__squares_see(spw_engine *e, uint32_t unit_idx)
{
    exact_sum own = {.adds = 0};
    double there = 0;
    for (uint64_t i = e->unit_partial[unit_idx]; i < e->unit_partial[unit_idx + 1]; i++)
        spw__exact_add(&own, e->partials[i]);
    pthread_mutex_lock(&e->squares_lock);
    spw__exact_merge(&e->squares, &own);
    if (e->goes_ahead)
        there = spw__exact_value(&e->squares);
    pthread_mutex_unlock(&e->squares_lock);
    if (e->goes_ahead)
        spw__ahead_see(e, there);
}

/* Over all ranks. The norm's bits depend neither on their number, nor on what of the gradients each has, nor on the units. */
static spw_status
sum_step(spw_engine *e, uint32_t micro_batches, const int32_t *targets, double *loss, double *grad_norm, spw_error *err)
{
    double sums[PREFERRED_VALUES + 1 + EXACT_VALUES];
    exact_sum squares = {.adds = 0};
    bool parted = e->layout.parts > 1;
    const uint32_t spenders = sum_own(e, micro_batches, targets, sums), first = spenders + 1;
    sums[spenders] = e->goes_ahead && e->plan.grad_nvme > 0;
    if (!parted || e->rank < e->layout.parts) /* each part once */
        squares = e->squares;
    spw__exact_save(&squares, sums + first);
    if (e->ranks != NULL)
        SPW_TRY(spw__ranks_sum(e->ranks, sums, parted ? first + EXACT_VALUES : first, err));
    if (parted)
        spw__exact_load(&squares, sums + first);
    e->may_spend = sums[spenders] > 0;
    *loss = mean_of(e, sums);
    *grad_norm = sqrt(spw__exact_value(&squares));
    return SPW_OK;
}

/* ---------------------------------------------------------------- steps */

/* Ids without their marks, and what follows from the marks, to the device. */
static void
load_documents(spw_engine *e, const int32_t *tokens, uint32_t micro)
{
    const uint64_t rows = e->B * e->T, all = e->micro_max * rows, at = micro * rows;
    int32_t *ids = e->window, *places = ids + rows, *begins = places + rows, *ends = begins + rows;
    int32_t *device_begins = e->documents + e->micro_max * e->rows + at, *device_ends = device_begins + all;
    const chunk_rows chunks = spw__chunks_of(e, micro);
    for (uint64_t i = 0; i < rows; i++) {
        bool first = i % e->T == 0 || (tokens[at + i] & SPW_TOKEN_BEGINS) != 0;
        ids[i] = tokens[at + i] & ~SPW_TOKEN_BEGINS;
        begins[i] = first ? (int32_t)(i % e->T) : begins[i - 1];
        places[i] = (int32_t)(i % e->T) - begins[i];
    }
    for (uint64_t i = rows; i-- > 0;) {
        bool last = i % e->T == e->T - 1;
        ends[i] = last ? (int32_t)e->T : begins[i + 1] == begins[i] ? ends[i + 1] : begins[i + 1];
    }
    spw_gpu_write_bytes(e->compute, e->tokens + micro * e->rows, spw__own_rows(e, ids, 0), e->rows * sizeof *ids);
    spw_gpu_write_bytes(e->compute, e->documents + micro * e->rows, spw__own_rows(e, places, 1), e->rows * sizeof *ids);
    spw_gpu_write_bytes(e->compute, device_begins, begins, rows * sizeof *ids);
    spw_gpu_write_bytes(e->compute, device_ends, ends, rows * sizeof *ids);
    if (chunks.begins != NULL)
        spw_gpu_chunks(e->compute, chunks.begins, chunks.ends, device_begins, device_ends, NULL, e->B, e->T,
                       e->model->config.chunk);
}

/* Looks at tokens and targets of this rank's rows of a micro-batch, and notes which of them have a target: *targeted. */
static spw_status
load_targets(spw_engine *e, const int32_t *tokens, const int32_t *targets, uint32_t micro, uint64_t *targeted,
             spw_error *err)
{
    const uint64_t vocab = e->model->config.vocab;
    const int32_t marks = e->documents != NULL ? SPW_TOKEN_BEGINS : 0;
    uint32_t count = 0;
    for (uint64_t i = 0; i < e->rows; i++) {
        const int32_t token = tokens[i], target = targets[i];
        if (token < 0 || (uint64_t)(token & ~marks) >= vocab || target < -1 ||
            (target >= 0 && (uint64_t)target >= vocab))
            return SPW_RAISE(err, SPW_EINVAL, "token %d (target %d) is outside the vocabulary of %llu", token, target,
                             (unsigned long long)vocab);
        if (target >= 0 && e->hides_targets)
            e->targeted_host[count] = (int32_t)i;
        count += target >= 0;
    }
    *targeted = count;
    if (!e->hides_targets)
        return SPW_OK;
    e->targeted_counts[micro] = count;
    if (count > 0)
        spw_gpu_write_bytes(e->compute, e->targeted + micro * e->rows, e->targeted_host, count * sizeof *e->targeted);
    return SPW_OK;
}

/* Finds the pairs of a micro-batch, and puts them beside its tokens. */
static spw_status
load_pairs(spw_engine *e, const int32_t *tokens, const int32_t *targets, uint32_t micro, spw_error *err)
{
    const uint64_t max = spw__pairs_max(e), begin = micro * e->rows;
    spw_pair *pairs = e->pairs_host + micro * max;
    uint32_t count = 0;
    for (uint64_t first = 0; first < e->rows; first += e->T) {
        const uint64_t at = begin + first;
        for (spw_pair p = {.end = 0};;) {
            SPW_TRY(spw__pair_next(&p, tokens + at, targets + at, e->T, (uint64_t)p.end, err));
            if (p.end == 0)
                break;
            if (count == max)
                return SPW_RAISE(err, SPW_EINVAL, "more than %llu pairs of answers in a micro-batch of %llu tokens",
                                 (unsigned long long)max, (unsigned long long)e->rows);
            pairs[count++] =
                (spw_pair){.chosen = p.chosen + (int32_t)first,
                           .rejected = p.rejected + (int32_t)first,
                           .end = p.end + (int32_t)first,
                           .reference = {e->reference != NULL ? e->reference[at + (uint64_t)p.chosen] : 0,
                                         e->reference != NULL ? e->reference[at + (uint64_t)p.rejected] : 0}};
        }
    }
    e->pair_counts[micro] = count;
    if (count > 0)
        spw_gpu_write_bytes(e->compute, e->pairs + micro * max, pairs, count * sizeof *pairs);
    return SPW_OK;
}

static spw_status
load_batch(spw_engine *e, const int32_t *tokens, const int32_t *targets, uint32_t micro_batches, spw_error *err)
{
    const uint64_t whole = e->B * e->T, bytes = e->rows * sizeof *tokens;
    uint64_t count = 0;
    if (micro_batches == 0 || micro_batches > e->micro_max)
        return SPW_RAISE(err, SPW_EINVAL, "%u micro-batches, the engine was made for 1 to %u", micro_batches,
                         e->micro_max);
    for (uint32_t micro = 0; micro < micro_batches; micro++) {
        const int32_t *own = spw__own_rows(e, tokens + micro * whole, 0);
        uint64_t targeted = 0;
        SPW_TRY(load_targets(e, own, spw__own_rows(e, targets + micro * whole, 1), micro, &targeted, err));
        if (e->prefers)
            SPW_TRY(load_pairs(e, tokens, targets, micro, err));
        count += e->prefers ? e->pair_counts[micro] : targeted;
    }
    if (e->ranks != NULL) {
        double all = (double)count;
        SPW_TRY(spw__ranks_begin(e->ranks, &all, err));
        count = (uint64_t)all;
    }
    e->target_count = count;
    for (uint32_t micro = 0; micro < micro_batches; micro++) {
        const int32_t *own_targets = spw__own_rows(e, targets + micro * whole, 1);
        spw_gpu_write_bytes(e->compute, e->targets + micro * e->rows, own_targets, bytes);
        if (e->documents != NULL)
            load_documents(e, tokens, micro);
        else
            spw_gpu_write_bytes(e->compute, e->tokens + micro * e->rows, spw__own_rows(e, tokens + micro * whole, 0),
                                bytes);
    }
    return SPW_OK;
}

/* What the counters said when a step began. */
typedef struct step_start {
    uint64_t begin_ns, cpu_ns, run_delay_ns, d2h_bytes, h2d_bytes;
    spw_store_stats store;
    spw_act_stats kept;
} step_start;

static void
begin_account(spw_engine *e, step_start *s)
{
    *s = (step_start){.begin_ns = spw_now_ns(),
                      .cpu_ns = spw_process_cpu_ns(),
                      .run_delay_ns = spw_thread_run_delay_ns(),
                      .d2h_bytes = e->d2h_bytes,
                      .h2d_bytes = e->h2d_bytes};
    spw_store_get_stats(e->store, &s->store);
    spw_act_get_stats(e->act, &s->kept);
    e->compute_ns = 0;
    __atomic_store_n(&e->device_ns, 0, __ATOMIC_RELAXED); /* of evaluations */
    memset(e->stall_ns, 0, sizeof e->stall_ns);
    if (!e->counting) {
        e->counted = s->store;
        if (e->ranks != NULL)
            spw__ranks_bytes(e->ranks, &e->gathered, &e->reduced, &e->traded);
    }
}

/*
 * Of a device that works by itself computing is what it did by its own clock. The thread waits while the device computes, too;
 * only the time in which the device did not is lost to waiting, for each cause its share.
 */
static void
idle_only(spw_engine *e, spw_step_result *r, double *computing, double *waits)
{
    double device = (double)__atomic_exchange_n(&e->device_ns, 0, __ATOMIC_RELAXED) * 1e-9, share;
    *computing = device < r->step_s ? device : r->step_s;
    share = *waits > r->step_s - *computing ? (r->step_s - *computing) / *waits : 1;
    for (int k = 0; k < SPW_STALL_COUNT; k++)
        r->stall_s[k] *= share;
    *waits *= share;
}

static void
end_account(spw_engine *e, const step_start *s, spw_step_result *r)
{
    spw_store_stats now;
    spw_act_stats kept_now;
    spw_step_load load = {0};
    double parts = (double)e->compute_ns * 1e-9, waits = 0;
    bool own = e->layout.parts == 1; /* else it is another thread that waits in the store */
    spw_store_get_stats(e->store, &now);
    spw_act_get_stats(e->act, &kept_now);
    r->step_s = (double)(spw_now_ns() - s->begin_ns) * 1e-9;
    r->cpu_s = (double)(spw_process_cpu_ns() - s->cpu_ns) * 1e-9;
    r->run_delay_s = (double)(spw_thread_run_delay_ns() - s->run_delay_ns) * 1e-9; /* 0 where the kernel does not say */
    for (int k = 0; k < SPW_STALL_COUNT; k++) {
        r->stall_s[k] = (double)((own ? now.stall_ns[k] - s->store.stall_ns[k] : 0) + e->stall_ns[k]) * 1e-9;
        waits += r->stall_s[k];
    }
    if (!e->host_addressable)
        idle_only(e, r, &parts, &waits);
    r->compute_s = parts;
    parts += waits;
    r->other_s = r->step_s - parts;
    r->nvme_read =
        now.nvme_read_bytes - e->counted.nvme_read_bytes + kept_now.nvme_read_bytes - s->kept.nvme_read_bytes;
    r->nvme_write =
        now.nvme_write_bytes - e->counted.nvme_write_bytes + kept_now.nvme_write_bytes - s->kept.nvme_write_bytes;
    r->h2d =
        now.h2d_bytes - e->counted.h2d_bytes + e->h2d_bytes - s->h2d_bytes + kept_now.h2d_bytes - s->kept.h2d_bytes;
    if (e->ranks != NULL) {
        spw_received gathered, reduced, traded;
        spw__ranks_bytes(e->ranks, &gathered, &reduced, &traded);
        load.gathered = (spw_received){gathered.all - e->gathered.all, gathered.far - e->gathered.far};
        load.reduced = (spw_received){reduced.all - e->reduced.all, reduced.far - e->reduced.far};
        load.traded = (spw_received){traded.all - e->traded.all, traded.far - e->traded.far};
        e->gathered = gathered;
        e->reduced = reduced;
        e->traded = traded;
        r->gather = load.gathered.all;
        r->reduce = load.reduced.all;
        r->trade = load.traded.all;
    }
    r->updates = now.updates - s->store.updates;
    r->ahead = now.ahead - s->store.ahead;
    r->undone = now.undone - s->store.undone;
    e->counted = now;
    e->counting = true;
    r->d2h = e->d2h_bytes - s->d2h_bytes + kept_now.d2h_bytes - s->kept.d2h_bytes;
    load.nvme_read = r->nvme_read;
    load.nvme_write = r->nvme_write;
    load.compute_s = r->compute_s;
    load.cpu_s = r->cpu_s;
    r->bound_by = spw_step_bound(&e->plan, &e->rates, &load, r->bounds_s);
    r->bound_s = r->bounds_s[r->bound_by];
}

/* Does the norm decide what the updates do, and whether they are done? */
static bool
norm_decides(const spw_config *c)
{
    return c->gradient_clipping > 0 || c->bf16_check_overflow || c->fp16;
}

/* What updates have done ahead does not stand; a failure is the store's, and the next call's. */
static void
undo(spw_engine *e)
{
    uint64_t begin = spw_now_ns();
    (void)spw_store_step_undo(e->store, NULL);
    e->stall_ns[SPW_STALL_OPTIMIZER] += spw_now_ns() - begin;
}

/* All passes, at the end of which every gradient is there, and its norm. */
static spw_status
make_gradients(spw_engine *e, const int32_t *targets, uint32_t micro_batches, double lr, double scale,
               spw_step_mode mode, double *loss, double *norm, spw_error *err)
{
    spw_trace_begin(&e->traces[MODE_TRAIN]);
    spw__tell_future(e, MODE_TRAIN);
    for (uint32_t first = 0; first < micro_batches; first += e->group_max) {
        uint32_t count = micro_batches - first < e->group_max ? micro_batches - first : e->group_max;
        bool final_group = first + count == micro_batches;
        SPW_TRY(spw__forward_group(e, MODE_TRAIN, first, count, true, err));
        if (final_group) {
            uint64_t begin = spw_now_ns();
            e->goes_ahead = mode == SPW_STEP_AHEAD;
            e->squares = (exact_sum){.adds = 0};
            if (mode != SPW_STEP_LATE)
                spw_store_step_begin(e->store, e->takes_part,
                                     mode); /* all updates of the last step are done: forward has waited for them */
            e->stall_ns[SPW_STALL_OPTIMIZER] += spw_now_ns() - begin;
            SPW_TRY(spw_store_check(e->store, err));
            if (mode == SPW_STEP_EARLY || mode == SPW_STEP_AHEAD)
                SPW_TRY(spw__set_coefficients(e, lr, scale, err));
            if (mode == SPW_STEP_EARLY)
                spw_store_step_go(e->store);
        }
        SPW_TRY(spw__backward_group(e, first, count, first > 0, final_group, err));
    }
    spw_trace_end(&e->traces[MODE_TRAIN]);
    spw__late_end(e);
    if (!e->host_addressable)
        spw_gpu_queue_sync(e->compute); /* it has told then what it computed (computed()) */
    SPW_TRY(spw__wait_grads(e, err));
    SPW_TRY(spw_gpu_check(e->gpu, err));
    SPW_TRY(sum_step(e, micro_batches, targets, loss, norm, err));
    *norm *= 1.0 / e->scaler.scale;
    return SPW_OK;
}

/*
 * Once more, with updates that know the norm: they change nothing until a gradient is there, so that these are the same to the bit. A loss or a
 * norm that is another one is the work of a device that cannot be trusted.
 */
static spw_status
make_again(spw_engine *e, const int32_t *targets, uint32_t micro_batches, double lr, double scale,
           const spw_step_result *r, spw_error *err)
{
    double loss, norm;
    SPW_TRY(make_gradients(e, targets, micro_batches, lr, scale, SPW_STEP_EARLY, &loss, &norm, err));
    if (memcmp(&loss, &r->loss, sizeof loss) == 0 && memcmp(&norm, &r->grad_norm, sizeof norm) == 0)
        return SPW_OK;
    return SPW_RAISE(err, SPW_ECORRUPT,
                     "a step that was computed twice had loss %.17g and gradient norm %.17g, and then %.17g and %.17g: "
                     "device %s, or its memory, does not compute the same each time",
                     r->loss, r->grad_norm, loss, norm, spw_gpu_get_info(e->gpu)->name);
}

/*
 * The decision when all gradients are there: finite check, clip, go or skip. What updates ahead have done, and should have done otherwise, is
 * taken back; gradients that they have consumed are made again.
 */
static spw_status
decide(spw_engine *e, uint32_t micro_batches, const int32_t *targets, double lr, spw_step_mode mode, spw_step_result *r,
       spw_error *err)
{
    const spw_config *c = &e->config;
    const bool stands = !norm_decides(c) || spw__norm_stands(e, r->grad_norm);
    bool gate_was_open = mode == SPW_STEP_EARLY;
    double scale = 1.0 / e->scaler.scale;
    r->loss_scale = e->scaler.scale;
    e->grad_factor = scale;
    e->grads_there = !gate_was_open;
    if (e->on_gradients != NULL)
        e->on_gradients(e->gradients_ctx, e);
    r->skipped = norm_decides(c) && !isfinite(r->grad_norm);
    if (!stands && mode != SPW_STEP_LATE)
        undo(e);
    if (!stands && !r->skipped) {
        scale *= c->gradient_clipping / (r->grad_norm + 1e-6);
        if (mode != SPW_STEP_LATE)
            SPW_TRY(spw__ahead_spent(e, &r->again, err));
        if (r->again) {
            spw_store_step_skip(e->store);
            SPW_TRY(make_again(e, targets, micro_batches, lr, scale, r, err));
            gate_was_open = true;
        }
    }
    if (norm_decides(c)) {
        spw__ahead_learn(&e->ahead, mode == SPW_STEP_AHEAD, stands);
        spw_loss_scale_update(&e->scaler, c, r->skipped);
    }
    if (r->skipped) {
        if (mode != SPW_STEP_LATE)
            spw_store_step_skip(e->store);
        return SPW_OK;
    }
    if (mode == SPW_STEP_LATE) {
        e->grads_there = false;
        spw__late_keep(e, lr, scale);
        return SPW_OK;
    }
    if (!gate_was_open) {
        e->grads_there = false;
        if (!stands || mode == SPW_STEP_GATED) /* else they are what updates under way go by */
            SPW_TRY(spw__set_coefficients(e, lr, scale, err));
        spw_store_step_go(e->store);
    }
    e->updates++;
    for (uint32_t u = 0; u < e->layout.unit_count; u++)
        e->generations[u] += e->takes_part[u];
    e->told.goes_on = false;
    return spw__orthogonal_all(e, gate_was_open, err);
}

spw_status
spw__engine_unbroken(const spw_engine *e, spw_error *err)
{
    if (e->broken.status != SPW_OK && err != NULL)
        *err = e->broken;
    return e->broken.status;
}

/* begun: it has changed something. */
static spw_status
run_step(spw_engine *e, const int32_t *tokens, const int32_t *targets, uint32_t micro_batches, double lr,
         spw_step_result *r, bool *begun, spw_error *err)
{
    spw_step_mode mode = SPW_STEP_GATED;
    step_start start;
    memset(r, 0, sizeof *r);
    if (e->inference)
        return SPW_RAISE(err, SPW_EINVAL, "an engine made for inference cannot train");
    SPW_TRY(spw__engine_unbroken(e, err));
    SPW_TRY(spw__check_rate(e, lr, err));
    if (spw__late_step(e))
        mode = SPW_STEP_LATE;
    else if (!norm_decides(&e->config) && e->on_gradients == NULL)
        mode = SPW_STEP_EARLY;
    else if (norm_decides(&e->config) && spw__ahead_try(e))
        mode = SPW_STEP_AHEAD;
    e->grads_there = false;
    e->expert_peak = 0;
    begin_account(e, &start);
    SPW_TRY(load_batch(e, tokens, targets, micro_batches, err));
    *begun = true;
    e->step_count++;
    SPW_TRY(spw__late_begin(e, err));
    SPW_TRY(make_gradients(e, targets, micro_batches, lr, 1.0 / e->scaler.scale, mode, &r->loss, &r->grad_norm, err));
    r->preferred = e->preferred;
    SPW_TRY(decide(e, micro_batches, targets, lr, mode, r, err));
    spw_trace_begin(&e->traces[MODE_TRAIN]); /* the updates to come are handed to the next forward pass */
    spw__tell_future(e, MODE_TRAIN);
    r->lr = lr;
    r->targets = e->target_count;
    r->tokens = (uint64_t)micro_batches * e->rows * e->world;
    r->expert_peak = e->expert_peak;
    end_account(e, &start, r);
    return spw_store_check(e->store, err);
}

spw_status
spw_engine_step(spw_engine *e, const int32_t *tokens, const int32_t *targets, uint32_t micro_batches, double lr,
                spw_step_result *r, spw_error *err)
{
    spw_error own = {0};
    bool begun = false;
    spw_status st;
    e->in_step = true;
    st = run_step(e, tokens, targets, micro_batches, lr, r, &begun, &own);
    e->in_step = false;
    if (st == SPW_OK)
        return st;
    if (begun) /* some units may be updated, and gradients on their way */
        spw_error_keep_first(&e->broken, &own);
    if (err != NULL)
        *err = own;
    return spw__ranks_fail(e->ranks, st, &own);
}

void
spw_engine_on_gradients(spw_engine *e, spw_gradients_fn fn, void *ctx)
{
    e->on_gradients = fn;
    e->gradients_ctx = ctx;
}

static spw_status
run_eval(spw_engine *e, const int32_t *tokens, const int32_t *targets, uint32_t micro_batches, double *loss_out,
         spw_error *err)
{
    double sums[PREFERRED_VALUES];
    uint32_t values;
    SPW_TRY(spw__engine_unbroken(e, err));
    SPW_TRY(load_batch(e, tokens, targets, micro_batches, err));
    e->counting = false;
    for (uint32_t first = 0; first < micro_batches; first += e->group_max) {
        uint32_t count = micro_batches - first < e->group_max ? micro_batches - first : e->group_max;
        spw_trace_begin(&e->traces[MODE_EVAL]); /* a pass: there may be any number of them */
        SPW_TRY(spw__forward_group(e, MODE_EVAL, first, count, false, err));
        spw_trace_end(&e->traces[MODE_EVAL]);
    }
    values = sum_own(e, micro_batches, targets, sums);
    SPW_TRY(spw_gpu_check(e->gpu, err));
    if (e->ranks != NULL)
        SPW_TRY(spw__ranks_sum(e->ranks, sums, values, err));
    *loss_out = mean_of(e, sums);
    return SPW_OK;
}

spw_status
spw_engine_eval(spw_engine *e, const int32_t *tokens, const int32_t *targets, uint32_t micro_batches, double *loss_out,
                spw_error *err)
{
    spw_status st = run_eval(e, tokens, targets, micro_batches, loss_out, err);
    return st == SPW_OK ? st : spw__ranks_fail(e->ranks, st, err);
}

void
spw_engine_set_reference(spw_engine *e, const double *reference)
{
    e->reference = reference;
}

void
spw_engine_answers(const spw_engine *e, const int32_t *targets, uint32_t micro_batches, double *out)
{
    const float *losses = e->host_addressable ? e->losses : e->losses_host; /* the evaluation has brought them */
    for (uint32_t m = 0; m < micro_batches; m++) {
        const uint64_t at = m * e->rows;
        for (uint32_t i = 0; i < e->pair_counts[m]; i++) {
            const spw_pair *p = &e->pairs_host[m * spw__pairs_max(e) + i];
            double sums[2];
            uint64_t counts[2];
            spw__pair_sums(p, losses + at, targets + at, sums, counts);
            out[at + (uint64_t)p->chosen] = sums[0];
            out[at + (uint64_t)p->rejected] = sums[1];
        }
    }
}

const spw_pair_means *
spw_engine_preferred(const spw_engine *e)
{
    return &e->preferred;
}
