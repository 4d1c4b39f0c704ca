/*
 * spillway train: reads the configuration, trains, shows every step, saves, and closes with a table. One process per rank,
 * one loop, the first rank speaks; Ctrl-C finishes the step, saves if a checkpoint folder is set, and removes the swap files.
 */
#include "cli.h"
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { OVERRIDES_MAX = 256, TIMELINE_EVENTS = 1 << 18 };

/* Everything one run owns; released in one place. */
typedef struct run {
    spw_config config;
    spw_comm *comm;
    spw_channel *talk; /* NULL: one rank */
    uint32_t rank, world;
    spw_data *data;
    spw_model *model;
    spw_engine *engine;
    spw_checkpoint_job *saving; /* NULL: none is under way */
    FILE *log;
    spw_monitor *monitor; /* of the first rank; NULL: none */
    int32_t *tokens, *targets;
    spw_checkpoint_state at;
    char weights_from[SPW_PATH_BYTES + 64]; /* of the checkpoint to go on from */
    const char *trace_path;
    bool quiet, tty, resumed, resume_anyway, from_folder, rates_known, spent;
    uint64_t begin_ns, last_line_ns, first_step, skipped, undone_steps, saved_step;
    /* Totals for the closing table. */
    spw_step_result sum;
    double first_loss, last_loss;
    uint64_t steps_done, stall_steps;
    char last_checkpoint[SPW_PATH_BYTES];
    /* Bytes to swap, of all ranks: by the runs before this one, since the first run, what a step writes, in these steps. */
    uint64_t carried_bytes, written, each_step, steps_wrote;
    uint64_t first_update; /* updates of the runs before */
    uint32_t speaker;      /* the rank that tells what failed */
} run;

/* ---------------------------------------------------------------- disk wear */

static uint64_t
written_per_step(const run *r)
{
    return spw_engine_plan(r->engine)->traffic[SPW_PACE_DEFAULT].nvme_write;
}

/* If all that is updated before the norm is known has to be taken back, it was written in vain. */
static uint64_t
written_at_most(const run *r)
{
    return written_per_step(r) + spw_engine_plan(r->engine)->spare_nvme;
}

/* Bytes that this rank has written to swap in this run, with what the updates so far will still write. */
static uint64_t
written_here(const run *r)
{
    const spw_plan *p = spw_engine_plan(r->engine);
    uint64_t updates = spw_engine_updates(r->engine) - r->first_update;
    uint64_t due = p->weight_nvme + p->record_nvme + updates * written_per_step(r); /* once at the start */
    spw_store_stats stats;
    spw_store_get_stats(spw_engine_store(r->engine), &stats);
    return stats.nvme_write_bytes > due ? stats.nvme_write_bytes : due;
}

/* With all ranks: each has counted its own, and all have to decide alike. */
static spw_status
count_written(run *r, spw_error *err)
{
    double sums[] = {(double)written_here(r), (double)written_at_most(r),
                     (double)r->sum.nvme_write}; /* exact: < 9 PB */
    SPW_TRY(spw_engine_sum(r->engine, sums, 3, err));
    r->written = r->carried_bytes + (uint64_t)sums[0];
    r->each_step = (uint64_t)sums[1];
    r->steps_wrote = (uint64_t)sums[2];
    return SPW_OK;
}

/* Is there a step left, and would it write more than it may? By what was counted last, so alike on all ranks. */
static bool
budget_spent(run *r)
{
    uint64_t budget = r->config.run.write_budget, next = r->each_step, before = r->written;
    char a[32], b[32], c[32];
    r->spent =
        r->at.step < r->config.run.steps && budget > 0 && next > 0 && (before > budget || next > budget - before);
    if (r->spent && r->rank == 0)
        printf("%s before step %llu: %s written to swap, the next step's %s would exceed spillway.write_budget (%s)\n",
               strcmp(r->config.run.write_budget_action, "pause") == 0 ? "paused" : "stopped",
               (unsigned long long)(r->at.step + 1),
               r->steps_done > 0 ? spw_format_bytes(a, sizeof a, before)
                                 : spw_format_bytes(a, sizeof a, r->carried_bytes),
               spw_format_bytes(b, sizeof b, next + (r->steps_done > 0 ? 0 : before - r->carried_bytes)),
               spw_format_bytes(c, sizeof c, budget));
    return r->spent;
}

/* ---------------------------------------------------------------- logs */

static void
log_object(run *r, json_t *object)
{
    char *text = r->log == NULL || object == NULL ? NULL : json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(17));
    if (text != NULL) {
        fprintf(r->log, "%s\n", text);
        fflush(r->log);
    }
    free(text);
    json_decref(object);
}

/* NaN and infinity have no JSON number: null. */
static json_t *
number(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static json_t *
stall_object(const spw_step_result *s)
{
    json_t *o = json_object();
    for (int k = 0; k < SPW_STALL_COUNT; k++)
        json_object_set_new(o, spw_stall_name((spw_stall)k), json_real(s->stall_s[k]));
    return o;
}

static json_t *
bound_object(const spw_step_result *s)
{
    json_t *o = json_object();
    for (int k = 0; k < SPW_RESOURCE_COUNT; k++)
        json_object_set_new(o, spw_resource_name((spw_resource)k), json_real(s->bounds_s[k]));
    return o;
}

static json_t *
bytes_object(const spw_step_result *s)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "nvme_read", (json_int_t)s->nvme_read, "nvme_write",
                     (json_int_t)s->nvme_write, "h2d", (json_int_t)s->h2d, "d2h", (json_int_t)s->d2h, "gather",
                     (json_int_t)s->gather, "reduce", (json_int_t)s->reduce);
}

static uint64_t
accounted_peak(const run *r)
{
    return spw_engine_plan(r->engine)->process_host + spw_engine_plan(r->engine)->tables_host + spw_region_bytes_peak();
}

static json_t *
peak_object(const run *r)
{
    return json_pack("{s:I, s:I, s:I}", "device", (json_int_t)spw_gpu_bytes_peak(spw_engine_gpu(r->engine)), "host",
                     (json_int_t)(accounted_peak(r) - spw_gpu_bytes_peak(spw_engine_gpu(r->engine))), "pinned",
                     (json_int_t)0);
}

static void
log_step(run *r, uint64_t step, const spw_step_result *s, double eval_loss)
{
    json_t *o;
    if (r->log == NULL)
        return;
    o = json_pack(
        "{s:I, s:o, s:o, s:f, s:f, s:I, s:f, s:f, s:f, s:s, s:f, s:b, s:f, s:o, s:f, s:f, s:o, s:o, s:o, s:I}", "step",
        (json_int_t)step, "loss", number(s->loss), "grad_norm", number(s->grad_norm), "lr", s->lr, "loss_scale",
        s->loss_scale, "tokens", (json_int_t)s->tokens, "step_s", s->step_s, "tokens_per_s",
        (double)s->tokens / s->step_s, "bound_s", s->bound_s, "bound_by", spw_resource_name(s->bound_by), "eta",
        s->bound_s / s->step_s, "skipped", (int)s->skipped, "compute_s", s->compute_s, "stall_s", stall_object(s),
        "other_s", s->other_s, "run_delay_s", s->run_delay_s, "resource_s", bound_object(s), "bytes", bytes_object(s),
        "peak_bytes", peak_object(r), "bytes_written_total", (json_int_t)r->written);
    if (!isnan(eval_loss))
        json_object_set_new(o, "eval_loss", json_real(eval_loss));
    if (s->expert_peak > 0)
        json_object_set_new(o, "expert_peak", json_real(s->expert_peak));
    if (spw_engine_plan(r->engine)->ahead)
        json_object_set_new(o, "updates",
                            json_pack("{s:I, s:I, s:I}", "done", (json_int_t)s->updates, "ahead", (json_int_t)s->ahead,
                                      "undone", (json_int_t)s->undone));
    log_object(r, o);
}

static void
monitor_step(run *r, uint64_t step, const spw_step_result *s, double eval_loss)
{
    uint64_t samples = step * r->config.train_batch_size;
    spw_monitor_write(r->monitor, "Train/Samples/train_loss", s->loss, samples);
    spw_monitor_write(r->monitor, "Train/Samples/lr", s->lr, samples);
    if (r->config.fp16)
        spw_monitor_write(r->monitor, "Train/Samples/loss_scale", s->loss_scale, samples);
    if (!isnan(eval_loss))
        spw_monitor_write(r->monitor, "Train/Samples/eval_loss", eval_loss, samples);
}

static void
show_step(run *r, uint64_t step, const spw_step_result *s, double eval_loss)
{
    uint64_t now = spw_now_ns(), total = r->config.run.steps;
    bool last = step == total;
    double stall = 0, per_step = (double)(now - r->begin_ns) * 1e-9 / (double)(step - r->first_step), left;
    char eval_text[40] = "", experts[40] = "", wrote[32], each[32];
    if (r->quiet ||
        (!r->tty && !last && step != r->first_step + 1 && isnan(eval_loss) && now - r->last_line_ns < 5000000000ull))
        return;
    r->last_line_ns = now;
    for (int k = 0; k < SPW_STALL_COUNT; k++)
        stall += s->stall_s[k];
    left = per_step * (double)(total - step);
    if (!isnan(eval_loss))
        snprintf(eval_text, sizeof eval_text, "  eval %.4f", eval_loss);
    if (s->expert_peak > 0)
        snprintf(experts, sizeof experts, "  busiest expert %.1fx", s->expert_peak);
    printf("step %llu/%llu  loss %.4f  norm %.2f  lr %.2e  %.0f tok/s  read %.2f GB/s  write %.2f GB/s  wrote %s "
           "(%s/token)  stall %.0f%%  "
           "bound %.0f%% %s%s  left %d:%02d%s%s\n",
           (unsigned long long)step, (unsigned long long)total, s->loss, s->grad_norm, s->lr,
           (double)s->tokens / s->step_s, (double)s->nvme_read / s->step_s * 1e-9,
           (double)s->nvme_write / s->step_s * 1e-9, spw_format_bytes(wrote, sizeof wrote, s->nvme_write),
           spw_format_bytes(each, sizeof each, s->nvme_write / s->tokens), 100 * stall / s->step_s,
           100 * s->bound_s / s->step_s, spw_resource_name(s->bound_by), experts, (int)left / 60, (int)left % 60,
           eval_text, s->skipped ? "  skipped (gradient not finite)" : "");
    fflush(stdout);
}

/* ---------------------------------------------------------------- parts of a run */

static spw_status
open_log(run *r, spw_error *err)
{
    char folder[SPW_PATH_BYTES], *slash;
    if (r->config.run.run_log[0] == '\0' || r->rank > 0)
        return SPW_OK;
    snprintf(folder, sizeof folder, "%s", r->config.run.run_log);
    slash = strrchr(folder, '/');
    if (slash != NULL) {
        *slash = '\0';
        if (folder[0] != '\0')
            SPW_TRY(spw_dir_make(folder, err));
    }
    r->log = fopen(r->config.run.run_log, r->resumed ? "ae" : "we");
    return r->log != NULL ? SPW_OK : SPW_RAISE_SYS(err, errno, "spillway.run_log %s", r->config.run.run_log);
}

/* Waits for the save under way, if there is one, and tells how it went. */
static spw_status
finish_save(run *r, spw_error *err)
{
    spw_checkpoint_job *job = r->saving;
    r->saving = NULL;
    return spw_checkpoint_finish(job, r->last_checkpoint, err);
}

/* Of the last step, once. wait: it is on disk when this returns. */
static spw_status
save(run *r, bool wait, spw_error *err)
{
    SPW_TRY(finish_save(r, err));
    if (r->config.run.checkpoint_dir[0] == '\0' || r->at.step == r->saved_step)
        return SPW_OK;
    r->at.bytes_written = r->written;
    SPW_TRY(spw_checkpoint_begin(&r->saving, r->engine, &r->config, r->config.run.checkpoint_dir, &r->at, err));
    r->saved_step = r->at.step;
    return wait ? finish_save(r, err) : SPW_OK;
}

/* Where micro-batch i of this rank begins: they go to the ranks in turn, so that these see together what one would see. */
static uint64_t
own_share(const run *r, uint64_t position, uint64_t i)
{
    return position + (i * r->world + r->rank) * r->config.micro_batch;
}

static spw_status
fill(run *r, spw_split split, uint64_t position, uint64_t batches, spw_error *err)
{
    uint64_t B = r->config.micro_batch, tokens = B * r->config.data.seq_length;
    for (uint64_t i = 0; i < batches; i++)
        SPW_TRY(spw_data_fill(r->data, split, own_share(r, position, i), B, r->tokens + i * tokens,
                              r->targets + i * tokens, err));
    return SPW_OK;
}

/* The next step's sequences come from disk while this one computes. */
static void
ask_ahead(const run *r, uint64_t position)
{
    uint64_t B = r->config.micro_batch;
    for (uint64_t i = 0; i < r->config.accumulation; i++)
        spw_data_ask(r->data, SPW_SPLIT_TRAIN, own_share(r, position, i), B);
}

/* The same sequences whatever the number of ranks: where they do not share out evenly, some have one without targets. */
static spw_status
evaluate(run *r, double *loss_out, spw_error *err)
{
    uint64_t have = spw_data_sequences(r->data, SPW_SPLIT_VALIDATION), B = r->config.micro_batch;
    uint64_t batches = have / B < r->config.run.eval_batches ? have / B : r->config.run.eval_batches;
    uint64_t each = (batches + r->world - 1) / r->world, own = batches / r->world + (r->rank < batches % r->world);
    uint64_t tokens = B * r->config.data.seq_length;
    *loss_out = NAN;
    if (batches == 0)
        return SPW_OK;
    SPW_TRY(fill(r, SPW_SPLIT_VALIDATION, 0, own, err));
    for (uint64_t i = own * tokens; i < each * tokens; i++) {
        r->tokens[i] = 0;
        r->targets[i] = -1;
    }
    return spw_engine_eval(r->engine, r->tokens, r->targets, (uint32_t)each, loss_out, err);
}

/* What goes to which swap folder, when there is a choice. */
static void
describe_paths(const spw_plan *p)
{
    uint64_t all = 0;
    char bytes[32], limit[32];
    for (uint32_t i = 0; i < p->path_count; i++)
        all += p->path_bytes[i];
    for (uint32_t i = 0; p->path_count > 1 && i < p->path_count; i++)
        printf("path     %s  %s, %.1f %% by weight %g%s%s\n", p->paths[i],
               spw_format_bytes(bytes, sizeof bytes, p->path_bytes[i]),
               all > 0 ? 100 * (double)p->path_bytes[i] / (double)all : 0.0, p->path_weight[i],
               p->path_limit[i] > 0 ? ", at most " : "",
               p->path_limit[i] > 0 ? spw_format_bytes(limit, sizeof limit, p->path_limit[i]) : "");
}

/* Rates that spillway plan has measured here, if any; training itself measures nothing. For the log: what they predict. */
static json_t *
use_rates(run *r)
{
    const spw_plan *p = spw_engine_plan(r->engine);
    spw_rates rates;
    spw_calibration calibration;
    spw_prediction x;
    spw_calibrate(&rates, &r->config, p, SPW_CALIBRATE_CACHE_ONLY, &calibration);
    spw_plan_predict(p, &rates, r->config.run.tbw, &x);
    spw_engine_set_rates(r->engine, &rates);
    r->rates_known = true;
    for (uint32_t i = 0; i < p->path_count; i++)
        r->rates_known &= rates.nvme_read[i] > 0;
    if (x.timed && !r->quiet)
        printf("plan     at least %.3g s a step, %.0f tokens/s at most, bound by %s\n", x.step_s, x.tokens_per_s,
               spw_resource_name(x.bound));
    return json_pack("{s:I, s:o, s:I, s:I, s:I, s:I}", "process", (json_int_t)p->process_host, "step_s",
                     number(x.timed ? x.step_s : NAN), "nvme_read", (json_int_t)x.traffic.nvme_read, "nvme_write",
                     (json_int_t)x.traffic.nvme_write, "h2d", (json_int_t)x.traffic.h2d, "d2h",
                     (json_int_t)x.traffic.d2h);
}

static void
describe(const run *r)
{
    const spw_config *c = &r->config;
    const spw_layout *l = spw_engine_layout(r->engine);
    char bytes[32], reason[160];
    const char *rope = cli_rope_choice(c, reason);
    printf("spillway %s  %s, %.2f M parameters in %u units, state format %s\n", SPW_VERSION,
           spw_family_name(c->model.family), (double)l->params * 1e-6, l->unit_count,
           spw_state_name(c->run.state_format));
    printf("device   %s\n", spw_gpu_get_info(spw_engine_gpu(r->engine))->description);
    if (r->world > 1)
        printf("ranks    %u on %u host%s, %s, stage %u\n", r->world, spw_comm_get_info(r->comm)->host_count,
               spw_comm_get_info(r->comm)->host_count > 1 ? "s" : "", spw_comm_get_info(r->comm)->backend,
               c->zero.stage);
    printf("data     %u file(s) (%s), %s, %llu training and %llu held-out sequences of %llu tokens\n",
           spw_data_file_count(r->data), spw_data_formats(r->data),
           spw_format_bytes(bytes, sizeof bytes, spw_data_bytes(r->data)),
           (unsigned long long)spw_data_sequences(r->data, SPW_SPLIT_TRAIN),
           (unsigned long long)spw_data_sequences(r->data, SPW_SPLIT_VALIDATION),
           (unsigned long long)c->data.seq_length);
    if (spw_data_chat(r->data)[0] != '\0')
        printf("chat     %s\n", spw_data_chat(r->data));
    if (rope != NULL)
        printf("rope     %s: %s\n", rope, reason);
    printf("aio      %s\n", spw_store_aio_reason(spw_engine_store(r->engine)));
    describe_paths(spw_engine_plan(r->engine));
    if (r->from_folder)
        printf("start    the weights in %s\n", c->model_path);
    if (r->resumed)
        printf("resumed  at step %llu\n", (unsigned long long)r->at.step);
    if (c->run.checkpoint_dir[0] == '\0')
        printf("saves    nothing: spillway.checkpoint_dir is empty\n");
}

/* The log's first line: what is trained, and what the plan says of it. */
static void
log_start(run *r)
{
    const spw_config *c = &r->config;
    const spw_layout *l = spw_engine_layout(r->engine);
    const spw_gpu_info *device = spw_gpu_get_info(spw_engine_gpu(r->engine));
    spw_model_config m = r->model->config;
    json_t *plan = use_rates(r);
    log_object(r,
               json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:s, s:s, s:I, s:s, s:f, s:f, s:o}", "run", "spillway",
                         "version", SPW_VERSION, "family", spw_family_name(c->model.family), "params",
                         (json_int_t)l->params, "layers", (json_int_t)m.layers, "width", (json_int_t)m.width,
                         "chunk_elems", (json_int_t)c->run.chunk_elems, "state_format",
                         spw_state_name(c->run.state_format), "aio", spw_store_aio_reason(spw_engine_store(r->engine)),
                         "first_step", (json_int_t)(r->at.step + 1), "device", device->description, "peak_flops",
                         device->peak_flops, "model_flops", spw_engine_plan(r->engine)->model_flops, "plan", plan));
}

static void
print_line(void *ctx, const char *text)
{
    (void)ctx;
    puts(text);
}

static void
closing_table(run *r)
{
    const spw_plan *p = spw_engine_plan(r->engine);
    const spw_step_result *s = &r->sum;
    double n = r->steps_done > 0 ? (double)r->steps_done : 1, params = (double)spw_engine_layout(r->engine)->params;
    double wall = s->step_s > 0 ? s->step_s : 1;
    char a[32], b[32], c[32];
    spw_store_stats stats;
    spw_store_get_stats(spw_engine_store(r->engine), &stats);
    printf("\n%llu steps in %.1f s, %llu tokens, %.0f tokens/s; loss %.4f -> %.4f\n", (unsigned long long)r->steps_done,
           (double)(spw_now_ns() - r->begin_ns) * 1e-9, (unsigned long long)s->tokens, (double)s->tokens / wall,
           r->first_loss, r->last_loss);
    printf("  %-14s %14s %14s %12s\n", "link", "bytes", "per step", "per param");
    {
        const struct {
            const char *name;
            uint64_t bytes;
        } links[] = {{"nvme read", s->nvme_read}, {"nvme write", s->nvme_write}, {"h2d", s->h2d}, {"d2h", s->d2h},
                     {"gathered", s->gather},     {"reduced", s->reduce}};
        for (size_t i = 0; i < (r->world > 1 ? 6 : 4); i++)
            printf("  %-14s %14s %14s %12.2f\n", links[i].name, spw_format_bytes(a, sizeof a, links[i].bytes),
                   spw_format_bytes(b, sizeof b, (uint64_t)((double)links[i].bytes / n)),
                   (double)links[i].bytes / n / params);
    }
    printf("  step time        computing %.1f%%", 100 * s->compute_s / wall);
    for (int k = 0; k < SPW_STALL_COUNT; k++) {
        if (s->stall_s[k] >= 0.0005 * wall)
            printf(", waiting for %s %.1f%%", spw_stall_name((spw_stall)k), 100 * s->stall_s[k] / wall);
    }
    printf(", other %.1f%%", 100 * s->other_s / wall);
    if (s->run_delay_s >= 0.005 * wall)
        printf("; ready without a processor %.1f%%", 100 * s->run_delay_s / wall);
    printf("\n");
    printf("  busy             ");
    for (int k = 0, shown = 0; k < SPW_RESOURCE_COUNT; k++) {
        if (s->bounds_s[k] > 0)
            printf("%s%s %.0f%%", shown++ ? ", " : "", spw_resource_name((spw_resource)k), 100 * s->bounds_s[k] / wall);
    }
    printf(" of the time%s\n", r->rates_known ? "" : "; rates of the disks are unknown: spillway plan measures them");
    printf("  model            %.3g FLOP a step, %.4g TFLOP/s", p->model_flops, p->model_flops * n / wall * 1e-12);
    if (spw_gpu_get_info(spw_engine_gpu(r->engine))->peak_flops > 0)
        printf(", %.1f%% of the device's peak (MFU)",
               100 * p->model_flops * n / wall / spw_gpu_get_info(spw_engine_gpu(r->engine))->peak_flops);
    printf("\n");
    printf("  bound / measured %.0f%%, prefetch hits %.1f%% of %llu uses%s\n", 100 * s->bound_s / wall,
           stats.uses > 0 ? 100.0 * (double)stats.hits / (double)stats.uses : 0.0, (unsigned long long)stats.uses,
           r->skipped > 0 ? ", steps were skipped" : "");
    if (p->ahead && stats.updates > stats.undone)
        printf("  before the norm  %.1f%% of %llu updates of chunks; %llu were taken back, in %llu steps\n",
               100.0 * (double)stats.ahead / (double)(stats.updates - stats.undone),
               (unsigned long long)(stats.updates - stats.undone), (unsigned long long)stats.undone,
               (unsigned long long)r->undone_steps);
    if (stats.checked_bytes > 0 && s->cpu_s > 0)
        printf("  integrity        %s checked, %.1f%% of the processor time\n",
               spw_format_bytes(a, sizeof a, stats.checked_bytes), 100 * (double)stats.checksum_ns * 1e-9 / s->cpu_s);
    spw_plan_print(p, print_line, NULL);
    printf("  peak memory      %s accounted, %s measured by the kernel, %s planned\n",
           spw_format_bytes(a, sizeof a, accounted_peak(r)),
           spw_format_bytes(b, sizeof b, spw_process_rss_peak_bytes()),
           spw_format_bytes(c, sizeof c, p->host_bytes + p->device_bytes));
    printf("  disk wear        wrote %s to swap, %s a step, %s a token", spw_format_bytes(a, sizeof a, r->written),
           spw_format_bytes(b, sizeof b, (uint64_t)((double)r->steps_wrote / n)),
           spw_format_bytes(c, sizeof c, r->steps_wrote / (s->tokens > 0 ? s->tokens : 1)));
    if (r->config.run.tbw > 0)
        printf(", %.4f %% of the disk's rated %.4g TB", 100 * (double)r->written / (double)r->config.run.tbw,
               (double)r->config.run.tbw * 1e-12);
    printf("\n");
    if (r->last_checkpoint[0] != '\0')
        printf("  checkpoint       %s\n", r->last_checkpoint);
    log_object(r, json_pack("{s:s, s:I, s:I, s:f, s:o, s:o, s:o, s:{s:I, s:I}, s:I, s:I, s:I, s:I}", "run", "closed",
                            "steps", (json_int_t)r->steps_done, "tokens", (json_int_t)s->tokens, "step_s", s->step_s,
                            "stall_s", stall_object(s), "bytes", bytes_object(s), "peak_bytes", peak_object(r),
                            "plan_bytes", "host", (json_int_t)p->host_bytes, "device", (json_int_t)p->device_bytes,
                            "rss_peak_bytes", (json_int_t)spw_process_rss_peak_bytes(), "uses", (json_int_t)stats.uses,
                            "hits", (json_int_t)stats.hits, "bytes_written_total", (json_int_t)r->written));
}

static void
add_step(run *r, const spw_step_result *s)
{
    r->sum.tokens += s->tokens;
    r->sum.step_s += s->step_s;
    r->sum.compute_s += s->compute_s;
    r->sum.other_s += s->other_s;
    r->sum.cpu_s += s->cpu_s;
    r->sum.run_delay_s += s->run_delay_s;
    r->sum.bound_s += s->bound_s;
    for (int k = 0; k < SPW_RESOURCE_COUNT; k++)
        r->sum.bounds_s[k] += s->bounds_s[k];
    r->sum.nvme_read += s->nvme_read;
    r->sum.nvme_write += s->nvme_write;
    r->sum.h2d += s->h2d;
    r->sum.d2h += s->d2h;
    r->sum.gather += s->gather;
    r->sum.reduce += s->reduce;
    for (int k = 0; k < SPW_STALL_COUNT; k++)
        r->sum.stall_s[k] += s->stall_s[k];
    if (r->steps_done == 0)
        r->first_loss = s->loss;
    r->last_loss = s->loss;
    r->steps_done++;
    r->skipped += s->skipped;
    r->undone_steps += s->undone > 0;
}

/* All ranks stop when one of them has to. */
static spw_status
go_on(run *r, bool *more, spw_error *err)
{
    double stop = cli_stop || r->spent || budget_spent(r);
    SPW_TRY(spw_engine_sum(r->engine, &stop, 1, err));
    *more = r->at.step < r->config.run.steps && stop == 0;
    return SPW_OK;
}

static spw_status
train_loop(run *r, spw_error *err)
{
    const spw_config *c = &r->config;
    uint64_t per_step = c->micro_batch * c->accumulation * r->world;
    bool more;
    r->first_step = r->at.step;
    r->saved_step = r->resumed ? r->at.step : UINT64_MAX;
    r->begin_ns = spw_now_ns();
    for (;;) {
        spw_step_result s;
        double eval_loss = NAN;
        uint64_t step = r->at.step + 1, begin = spw_now_ns();
        double data_s;
        SPW_TRY(go_on(r, &more, err));
        if (!more)
            break;
        SPW_TRY(fill(r, SPW_SPLIT_TRAIN, r->at.data_position, c->accumulation, err));
        ask_ahead(r, r->at.data_position + per_step);
        data_s = (double)(spw_now_ns() - begin) * 1e-9;
        SPW_TRY(spw_engine_step(r->engine, r->tokens, r->targets, (uint32_t)c->accumulation,
                                spw_schedule_lr(c, r->at.updates + 1), &s, err));
        s.stall_s[SPW_STALL_DATA] += data_s;
        s.step_s += data_s;
        if (r->saving != NULL && spw_checkpoint_done(r->saving))
            SPW_TRY(finish_save(r, err));
        r->at.step = step;
        r->at.data_position += per_step;
        r->at.updates = spw_engine_updates(r->engine);
        r->at.tokens += (double)s.tokens;
        if (c->run.eval_interval > 0 && (step % c->run.eval_interval == 0 || step == c->run.steps))
            SPW_TRY(evaluate(r, &eval_loss, err));
        SPW_TRY(count_written(r, err));
        add_step(r, &s);
        log_step(r, step, &s, eval_loss);
        monitor_step(r, step, &s, eval_loss);
        show_step(r, step, &s, eval_loss);
        if (c->run.checkpoint_interval > 0 && step % c->run.checkpoint_interval == 0)
            SPW_TRY(save(r, !c->run.save_in_background, err));
    }
    if (r->spent && r->steps_done == 0)
        return SPW_OK; /* nothing was loaded */
    SPW_TRY(spw_engine_drain(r->engine, err));
    SPW_TRY(count_written(r, err));
    if (cli_stop && r->rank == 0)
        printf("stopped by a signal after step %llu\n", (unsigned long long)r->at.step);
    return c->run.save_at_end || r->spent ? save(r, true, err) : finish_save(r, err);
}

static void
print_difference(void *ctx, const char *text)
{
    if (((const run *)ctx)->rank > 0)
        return;
    fprintf(stderr, "  %s\n", text);
}

static void
summarize_data(run *r)
{
    spw_data_summary *d = &r->at.data;
    *d = (spw_data_summary){.files = spw_data_file_count(r->data),
                            .bytes = spw_data_bytes(r->data),
                            .tokens = spw_data_tokens(r->data),
                            .held_out = spw_data_sequences(r->data, SPW_SPLIT_VALIDATION),
                            .held_out_known = true};
    d->held_out_moved = spw_data_split_moved(r->data, &d->held_out_before);
    snprintf(d->formats, sizeof d->formats, "%s", spw_data_formats(r->data));
    snprintf(d->encoder, sizeof d->encoder, "%s", spw_data_encoder(r->data));
}

/* Another training than the checkpoint's is refused, unless it is meant; either way every difference is shown. */
static spw_status
compare(const run *r, const char *checkpoint, spw_error *err)
{
    uint32_t count;
    SPW_TRY(spw_checkpoint_compare(checkpoint, &r->config, &r->at.data, print_difference, (void *)(uintptr_t)r, &count,
                                   err));
    if (count == 0)
        return SPW_OK;
    if (!r->resume_anyway)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "%s: %u difference%s (above) would change what is computed; set them as they were, or go on "
                         "with --resume-anyway",
                         checkpoint, count, count > 1 ? "s" : "");
    if (r->rank == 0)
        fprintf(stderr, "spillway: going on from %s with %u difference%s (above)\n", checkpoint, count,
                count > 1 ? "s" : "");
    return SPW_OK;
}

/* The first rank writes them: what cannot be is said before anything is taken. */
static spw_status
check_outputs(const run *r, spw_error *err)
{
    const char *checkpoints = r->config.run.checkpoint_dir;
    if (r->rank > 0)
        return SPW_OK;
    if (checkpoints[0] != '\0')
        SPW_TRY(cli_check_folder("spillway.checkpoint_dir", checkpoints, err));
    return r->trace_path != NULL ? cli_check_file("--trace", r->trace_path, err) : SPW_OK;
}

/*
 * What a rank does by itself up to the data; found is the checkpoint, "" without one. One rank of each host makes tokens of text
 * and JSON lines, and the others, who open the data after that, find them made: together they would all do the same work on
 * the same processors, and each write a file of its own.
 */
static spw_status
open_first(run *r, const char *resume, char found[SPW_PATH_BYTES], spw_error *err)
{
    SPW_TRY(check_outputs(r, err));
    if (resume != NULL) {
        static spw_config saved;
        SPW_TRY(spw_checkpoint_find(resume, found, err));
        SPW_TRY(spw_checkpoint_read_config(found, &saved, &r->at, err));
        snprintf(r->weights_from, sizeof r->weights_from, "%.1000s/model.safetensors", found);
        r->resumed = true;
    }
    return spw_comm_get_info(r->comm)->local_rank == 0 ? spw_config_open_data(&r->data, &r->config, err) : SPW_OK;
}

/* And up to the model. */
static spw_status
prepare(run *r, const char *found, spw_error *err)
{
    const spw_config *c = &r->config;
    uint64_t batches = c->accumulation > c->run.eval_batches ? c->accumulation : c->run.eval_batches;
    if (r->data == NULL)
        SPW_TRY(spw_config_open_data(&r->data, c, err));
    summarize_data(r);
    if (r->resumed)
        SPW_TRY(compare(r, found, err));
    r->tokens = spw_mem_calloc(batches * c->micro_batch * c->data.seq_length, sizeof(int32_t));
    r->targets = spw_mem_calloc(batches * c->micro_batch * c->data.seq_length, sizeof(int32_t));
    if (r->tokens == NULL || r->targets == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "batch of %llu tokens", (unsigned long long)(batches * c->micro_batch));
    return spw_model_from_config(&r->model, c, err);
}

static spw_status
create(run *r, bool plan_only, spw_plan *plan, spw_error *err)
{
    const spw_config *c = &r->config;
    return spw_engine_create(
        &r->engine,
        &(spw_engine_options){.config = c,
                              .model = r->model,
                              .comm = r->comm,
                              .plan_only = plan_only,
                              .caller_bytes = r->trace_path != NULL ? spw_timeline_bytes(TIMELINE_EVENTS) : 0,
                              .resumes = r->resumed || c->model_path[0] != '\0',
                              .weights_from = r->resumed ? r->weights_from : spw_config_start_folder(c),
                              .plan_out = plan},
        err);
}

/* Whether it fits, before ranks wait for each other in what takes the memory. One rank finds out there. */
static spw_status
check_fit(run *r, spw_plan *plan, spw_error *err)
{
    if (r->world == 1)
        return SPW_OK;
    SPW_TRY(create(r, true, plan, err));
    spw_engine_destroy(r->engine);
    r->engine = NULL;
    return SPW_OK;
}

/* Said before the first step: evaluations would be left out without a word. */
static void
warn_of_no_evaluation(const run *r)
{
    const spw_config *c = &r->config;
    uint64_t have = spw_data_sequences(r->data, SPW_SPLIT_VALIDATION);
    if (r->rank == 0 && c->run.eval_interval > 0 && c->run.eval_batches > 0 && have < c->micro_batch)
        fprintf(stderr,
                "spillway: warning: %llu sequences are held out (data.validation_split %g), a micro-batch takes %llu: "
                "nothing will be evaluated\n",
                (unsigned long long)have, c->data.validation_split, (unsigned long long)c->micro_batch);
}

/* Said before the first step: --resume would take the newest of both, and a step of the same number is replaced. */
static void
warn_of_other_run(const run *r)
{
    const char *folder = r->config.run.checkpoint_dir;
    char found[SPW_PATH_BYTES];
    spw_error ignored = {0};
    if (r->rank == 0 && !r->resumed && folder[0] != '\0' && spw_checkpoint_find(folder, found, &ignored) == SPW_OK)
        fprintf(stderr,
                "spillway: warning: spillway.checkpoint_dir holds %s of an earlier run, which this one does not go on "
                "from (--resume %s does)\n",
                found, folder);
}

/* Said before the first step: whoever sees it at the first save has trained for nothing. Room may still be made. */
static void
warn_of_full_disk(const run *r)
{
    const spw_config *c = &r->config;
    uint64_t need = spw_checkpoint_disk_bytes(r->engine), room;
    char path[SPW_PATH_BYTES], a[32], b[32];
    struct statvfs fs;
    if (c->run.checkpoint_dir[0] == '\0' || r->rank > 0)
        return;
    cli_nearest(path, c->run.checkpoint_dir);
    if (statvfs(path, &fs) != 0)
        return;
    room = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (fs.f_blocks > 0 && room < need)
        fprintf(stderr,
                "spillway: a checkpoint takes %s and spillway.checkpoint_dir %s has %s free: saving will fail unless "
                "room is made\n",
                spw_format_bytes(a, sizeof a, need), c->run.checkpoint_dir, spw_format_bytes(b, sizeof b, room));
}

/* Takes everything and fills it, with the other ranks. */
static spw_status
begin(run *r, const char *found, spw_plan *plan, spw_error *err)
{
    SPW_TRY(create(r, false, plan, err));
    SPW_TRY(open_log(r, err));
    if (r->rank == 0)
        SPW_TRY(spw_monitor_open(&r->monitor, &r->config, err));
    warn_of_full_disk(r);
    warn_of_no_evaluation(r);
    warn_of_other_run(r);
    if (r->trace_path != NULL)
        SPW_TRY(spw_timeline_open(TIMELINE_EVENTS, err));
    r->carried_bytes = r->at.bytes_written;
    SPW_TRY(count_written(r, err));
    if (budget_spent(r)) /* before the first byte is written */
        return SPW_OK;
    SPW_TRY(r->resumed ? spw_checkpoint_load(r->engine, found, err)
                       : spw_engine_start(r->engine, &r->from_folder, err));
    r->first_update = spw_engine_updates(r->engine);
    return SPW_OK;
}

/* The world that a launcher started this process into; the configuration is told how large it is. */
static spw_status
join(run *r, const char **overrides, uint32_t *override_count, spw_error *err)
{
    static char ranks[40];
    r->world = 1;
    SPW_TRY(spw_comm_open(&r->comm, &(spw_comm_options){.backend = SPW_COMM_AUTO}, err));
    r->rank = spw_comm_get_info(r->comm)->rank;
    r->world = spw_comm_get_info(r->comm)->world;
    if (r->world == 1)
        return SPW_OK;
    cli_set_rank(r->rank);
    snprintf(ranks, sizeof ranks, "spillway.ranks=%u", r->world);
    if (*override_count < OVERRIDES_MAX)
        overrides[(*override_count)++] = ranks;
    SPW_TRY(spw_channel_open(&r->talk, r->comm, NULL, 0, "start", err));
    spw_channel_set_timeout(r->talk, 24 * 3600); /* tokenizing may take a rank hours */
    return SPW_OK;
}

/*
 * After a phase that all ranks went through: whether any of them failed. Of those that did the first one speaks, since a
 * mistake in the configuration is one mistake. Returns the exit code of what that one says, on all of them: who ends first
 * decides the code of the job.
 */
static int
all_well(run *r, spw_status st, const spw_error *own)
{
    int32_t mine = (int32_t)st, *all = NULL;
    uint32_t first = r->rank;
    spw_error err = {0};
    int rc = st == SPW_OK ? EXIT_DONE : cli_exit_code(own);
    if (r->talk != NULL && (all = spw_mem_calloc(r->world, sizeof *all)) != NULL) {
        if (spw_exchange(r->talk, &mine, all, sizeof mine, &err) != SPW_OK)
            return cli_fail(st != SPW_OK ? own : &err);
        for (first = 0; first + 1 < r->world && all[first] == SPW_OK;)
            first++;
        rc = all[first] == SPW_OK ? EXIT_DONE : cli_exit_code(&(spw_error){.status = (spw_status)all[first]});
        r->speaker = first;
        spw_mem_free(all);
    }
    if (st != SPW_OK && first == r->rank)
        return cli_fail(own);
    return rc;
}

/* A failure that the others have to hear of: they are waiting for this rank, or soon will. */
static int
fail(run *r, const spw_error *err)
{
    spw_comm_abort(r->comm, err->message);
    return cli_fail(err);
}

static void
release(run *r)
{
    spw_error err = {0};
    if (finish_save(r, &err) != SPW_OK) /* training has failed, which has been said, and the save with it */
        fprintf(stderr, "spillway: the checkpoint of step %llu was not finished\n", (unsigned long long)r->saved_step);
    spw_engine_destroy(r->engine);
    spw_channel_close(r->talk);
    spw_comm_close(r->comm);
    spw_model_destroy(r->model);
    spw_data_close(r->data);
    spw_mem_free(r->tokens);
    spw_mem_free(r->targets);
    if (r->log != NULL)
        fclose(r->log);
    spw_monitor_close(r->monitor);
    spw_timeline_close();
}

int
cli_train(int argc, char **argv)
{
    static run r; /* large: the configuration holds its paths */
    static spw_plan plan;
    const char *path = NULL, *resume = NULL, *overrides[OVERRIDES_MAX];
    char found[SPW_PATH_BYTES] = "";
    spw_status st;
    uint32_t override_count = 0;
    uint64_t ranks = 0;
    spw_error err = {0};
    int rc = EXIT_DONE;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value;
        if (name[0] != '-') {
            if (path != NULL)
                return cli_usage("train", "one configuration at a time, got %s too", name);
            path = name;
        } else if (strcmp(name, "--quiet") == 0) {
            r.quiet = true;
        } else if (strcmp(name, "--resume-anyway") == 0) {
            r.resume_anyway = true;
        } else if (strcmp(name, "-n") == 0) {
            if ((value = cli_value("train", argc, argv, &i)) == NULL)
                return EXIT_USAGE;
            if (!cli_number(value, &ranks) || ranks == 0 || ranks > CLI_RANKS_MAX)
                return cli_usage("train", "-n takes 1 to %d ranks, not %s", CLI_RANKS_MAX, value);
        } else if (strcmp(name, "--set") == 0 || strcmp(name, "--resume") == 0 || strcmp(name, "--trace") == 0) {
            if ((value = cli_value("train", argc, argv, &i)) == NULL)
                return EXIT_USAGE;
            if (strcmp(name, "--resume") == 0)
                resume = value;
            else if (strcmp(name, "--trace") == 0)
                r.trace_path = value;
            else if (override_count < OVERRIDES_MAX)
                overrides[override_count++] = value;
            else
                return cli_usage("train", "more than %d times --set", OVERRIDES_MAX);
        } else {
            return cli_usage("train", "unknown option %s", name);
        }
    }
    if (path == NULL)
        return cli_usage("train", "a configuration file is needed");
    if (r.resume_anyway && resume == NULL)
        return cli_usage("train", "--resume-anyway belongs to --resume DIR");
    if (ranks > 0 && !cli_is_launched()) {
        if (getenv("RANK") != NULL && getenv("WORLD_SIZE") != NULL)
            return cli_usage(
                "train",
                "-n %llu starts ranks, but RANK is set: this is rank %s of the %s that a launcher started; "
                "leave out -n, or unset RANK and WORLD_SIZE",
                (unsigned long long)ranks, getenv("RANK"), getenv("WORLD_SIZE"));
        if (getenv("OMPI_COMM_WORLD_SIZE") != NULL && strcmp(getenv("OMPI_COMM_WORLD_SIZE"), "1") != 0)
            return cli_usage(
                "train", "-n %llu starts ranks, but mpirun started this process, one of %s: leave out -n, or mpirun",
                (unsigned long long)ranks, getenv("OMPI_COMM_WORLD_SIZE"));
        return cli_launch((uint32_t)ranks, argv - 1);
    }
    r.tty = isatty(STDOUT_FILENO) == 1;
    if (join(&r, overrides, &override_count, &err) != SPW_OK)
        return cli_fail(&err);
    cli_log(r.rank == 0); /* all ranks read the same file */
    st = spw_config_load(&r.config, path, overrides, override_count, &err);
    cli_log(true);
    if (st != SPW_OK)
        st = err.status = SPW_ECONFIG; /* whatever was wrong with it */
    if ((rc = all_well(&r, st, &err)) != EXIT_DONE) {
        release(&r);
        return rc;
    }
    spw_comm_set_timeout(r.comm, r.config.run.comm_timeout);
    if (r.rank > 0) {
        r.quiet = true;
        r.trace_path = NULL;
    }
    st = open_first(&r, resume, found, &err);
    rc = all_well(&r, st, &err);
    if (rc == EXIT_DONE) {
        st = prepare(&r, found, &err);
        rc = all_well(&r, st, &err);
    }
    if (rc == EXIT_DONE) {
        st = check_fit(&r, &plan, &err);
        rc = all_well(&r, st, &err);
        if (rc == EXIT_DONE && (st = begin(&r, found, &plan, &err)) != SPW_OK)
            rc = fail(&r, &err);
        if (st == SPW_ENOFIT && r.rank == r.speaker)
            cli_show_no_fit(&r.config, r.model, &plan);
    }
    if (rc == EXIT_DONE) {
        if (!r.quiet)
            describe(&r);
        log_start(&r);
        cli_catch_signals(); /* before, there is nothing to finish or to save */
        if (train_loop(&r, &err) != SPW_OK)
            rc = fail(&r, &err);
        else if (r.spent && strcmp(r.config.run.write_budget_action, "pause") == 0)
            rc = EXIT_PAUSED;
        if (r.trace_path != NULL && spw_timeline_write(r.trace_path, &err) != SPW_OK)
            rc = cli_fail(&err);
        if (r.rank == 0 && r.steps_done > 0 && (rc == EXIT_DONE || rc == EXIT_PAUSED))
            closing_table(&r);
    }
    release(&r);
    return rc;
}
