/*
 * What a run of spillway train shows on the terminal: what is trained and where, a line for each step or some of them, and at the end
 * a table of what the steps took and what bounds them.
 */
#include "train.h"
#include <math.h>
#include <stdio.h>

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

void
cli_train_show_start(const train_run *r)
{
    const spw_config *c = &r->config;
    const spw_layout *l = spw_engine_layout(r->engine);
    char bytes[32], reason[160];
    const char *rope = cli_rope_choice(c, reason);
    if (r->quiet)
        return;
    printf("spillway %s  %s, %.2f M parameters in %u units, state format %s\n", SPW_VERSION,
           spw_family_name(c->model.family), (double)l->params * 1e-6, l->unit_count,
           spw_state_name(c->run.state_format));
    printf("device   %s\n", spw_gpu_get_info(spw_engine_gpu(r->engine))->description);
    if (r->world > 1)
        printf("ranks    %u on %u host%s, %s, stage %u\n", r->world, spw_comm_get_info(r->comm)->host_count,
               spw_comm_get_info(r->comm)->host_count > 1 ? "s" : "", spw_comm_get_info(r->comm)->backend,
               c->zero.stage);
    if (spw_config_sharers(c) > 1)
        printf("shared   each sequence by %u ranks, %llu positions and a part of attention's heads each\n",
               spw_config_sharers(c), (unsigned long long)(c->data.seq_length / spw_config_sharers(c)));
    printf("data     %u file(s) (%s), %s, %llu training and %llu held-out sequences of %llu tokens\n",
           spw_data_file_count(r->data), spw_data_formats(r->data),
           spw_format_bytes(bytes, sizeof bytes, spw_data_bytes(r->data)),
           (unsigned long long)spw_data_sequences(r->data, SPW_SPLIT_TRAIN),
           (unsigned long long)spw_data_sequences(r->data, SPW_SPLIT_VALIDATION),
           (unsigned long long)c->data.seq_length);
    if (spw_data_pairs(r->data) > 0)
        printf("pairs    %llu, by %s\n", (unsigned long long)spw_data_pairs(r->data), c->run.preference.loss);
    if (spw_data_chat(r->data)[0] != '\0')
        printf("chat     %s\n", spw_data_chat(r->data));
    if (rope != NULL)
        printf("rope     %s: %s\n", rope, reason);
    printf("aio      %s\n", spw_store_aio_reason(spw_engine_store(r->engine)));
    describe_paths(spw_engine_plan(r->engine));
    if (r->from_folder)
        printf("start    the weights in %s\n", c->model_path);
    if (r->from_foreign)
        printf("resumed  at step %llu of another program's checkpoint; which sequences it took is not known: this "
               "program's "
               "order goes on behind the first %llu\n",
               (unsigned long long)r->at.step, (unsigned long long)r->at.data_position);
    else if (r->resumed)
        printf("resumed  at step %llu\n", (unsigned long long)r->at.step);
    if (c->run.checkpoint_dir[0] == '\0')
        printf("saves    nothing: spillway.checkpoint_dir is empty\n");
}

void
cli_train_show_prediction(const train_run *r, const spw_prediction *x)
{
    if (!x->timed || r->quiet)
        return;
    printf("plan     at least %.3g s a step, %.0f tokens/s at most, bound by %s", x->step_s, x->tokens_per_s,
           spw_resource_name(x->bound));
    if (x->clipped_s > 1.05 * x->step_s)
        printf("; %.3g s while every step clips", x->clipped_s);
    printf("\n");
}

void
cli_train_show_step(train_run *r, uint64_t step, const spw_step_result *s, double eval_loss)
{
    uint64_t now = spw_now_ns(), total = r->config.run.steps;
    bool last = step == total;
    double stall = 0, per_step = (double)(now - r->begin_ns) * 1e-9 / (double)(step - r->first_step), left;
    char loss[40] = "none (no target)", eval_text[60] = "", experts[40] = "", right[60] = "", wrote[32], each[32];
    if (r->quiet ||
        (!r->tty && !last && step != r->first_step + 1 && isnan(eval_loss) && now - r->last_line_ns < 5000000000ull))
        return;
    r->last_line_ns = now;
    for (int k = 0; k < SPW_STALL_COUNT; k++)
        stall += s->stall_s[k];
    left = per_step * (double)(total - step);
    if (s->targets > 0)
        snprintf(loss, sizeof loss, "%.4f", s->loss);
    if (s->preferred.pairs > 0)
        snprintf(right, sizeof right, "  right %.0f%%  margin %.3f", 100 * s->preferred.right,
                 s->preferred.chosen - s->preferred.rejected);
    if (!isnan(eval_loss) && spw_engine_preferred(r->engine)->pairs > 0)
        snprintf(eval_text, sizeof eval_text, "  eval %.4f  right %.0f%%", eval_loss,
                 100 * spw_engine_preferred(r->engine)->right);
    else if (!isnan(eval_loss))
        snprintf(eval_text, sizeof eval_text, "  eval %.4f", eval_loss);
    if (s->expert_peak > 0)
        snprintf(experts, sizeof experts, "  busiest expert %.1fx", s->expert_peak);
    printf("step %llu/%llu  loss %s%s  norm %.2f  lr %.2e  %.0f tok/s  read %.2f GB/s  write %.2f GB/s  wrote %s "
           "(%s/token)  stall %.0f%%  "
           "bound %.0f%% %s%s  left %d:%02d%s%s\n",
           (unsigned long long)step, (unsigned long long)total, loss, right, s->grad_norm, s->lr,
           (double)s->tokens / s->step_s, (double)s->nvme_read / s->step_s * 1e-9,
           (double)s->nvme_write / s->step_s * 1e-9, spw_format_bytes(wrote, sizeof wrote, s->nvme_write),
           spw_format_bytes(each, sizeof each, s->nvme_write / s->tokens), 100 * stall / s->step_s,
           100 * s->bound_s / s->step_s, spw_resource_name(s->bound_by), experts, (int)left / 60, (int)left % 60,
           eval_text, s->skipped ? "  skipped (gradient not finite)" : "");
    fflush(stdout);
}

uint64_t
cli_train_memory_peak(const train_run *r)
{
    const spw_plan *p = spw_engine_plan(r->engine);
    return p->process_host + p->tables_host - p->tables_arena + spw_region_bytes_peak();
}

static void
print_line(void *ctx, const char *text)
{
    (void)ctx;
    puts(text);
}

/* What crossed each link. */
static void
show_links(const train_run *r, double steps)
{
    const spw_step_result *s = &r->sum;
    const double params = (double)spw_engine_layout(r->engine)->params;
    const struct {
        const char *name;
        uint64_t bytes;
    } links[] = {{"nvme read", s->nvme_read}, {"nvme write", s->nvme_write}, {"h2d", s->h2d},     {"d2h", s->d2h},
                 {"gathered", s->gather},     {"reduced", s->reduce},        {"traded", s->trade}};
    const size_t count = r->world == 1 ? 4 : spw_config_sharers(&r->config) == 1 ? 6 : 7;
    char all[32], each[32];
    printf("  %-14s %14s %14s %12s\n", "link", "bytes", "per step", "per param");
    for (size_t i = 0; i < count; i++)
        printf("  %-14s %14s %14s %12.2f\n", links[i].name, spw_format_bytes(all, sizeof all, links[i].bytes),
               spw_format_bytes(each, sizeof each, (uint64_t)((double)links[i].bytes / steps)),
               (double)links[i].bytes / steps / params);
}

/* What the time went to, and how long of it each resource was busy. */
static void
show_time(const train_run *r, double wall)
{
    const spw_step_result *s = &r->sum;
    printf("  step time        computing %.1f%%", 100 * s->compute_s / wall);
    for (int k = 0; k < SPW_STALL_COUNT; k++) {
        if (s->stall_s[k] >= 0.0005 * wall)
            printf(", waiting for %s %.1f%%", spw_stall_name((spw_stall)k), 100 * s->stall_s[k] / wall);
    }
    printf(", other %.1f%%", 100 * s->other_s / wall);
    if (s->run_delay_s >= 0.005 * wall)
        printf("; ready without a processor %.1f%%", 100 * s->run_delay_s / wall);
    printf("\n  busy             ");
    for (int k = 0, shown = 0; k < SPW_RESOURCE_COUNT; k++) {
        if (s->bounds_s[k] > 0)
            printf("%s%s %.0f%%", shown++ ? ", " : "", spw_resource_name((spw_resource)k), 100 * s->bounds_s[k] / wall);
    }
    printf(" of the time%s%s\n", r->rates_known ? "" : "; rates of the disks are unknown: spillway plan measures them",
           r->ranks_known ? "" : "; how fast ranks reach each other is unknown: spillway bench comm measures it");
}

/* How near it came to what bounds it. */
static void
show_bounds(const train_run *r, double steps, double wall, const spw_store_stats *stats)
{
    const double flops = spw_engine_plan(r->engine)->model_flops,
                 peak = spw_gpu_get_info(spw_engine_gpu(r->engine))->peak_flops;
    printf("  model            %.3g FLOP a step, %.4g TFLOP/s", flops, flops * steps / wall * 1e-12);
    if (peak > 0)
        printf(", %.1f%% of the device's peak (MFU)", 100 * flops * steps / wall / peak);
    printf("\n  bound / measured %.0f%%, prefetch hits %.1f%% of %llu uses%s\n", 100 * r->sum.bound_s / wall,
           stats->uses > 0 ? 100.0 * (double)stats->hits / (double)stats->uses : 0.0, (unsigned long long)stats->uses,
           r->skipped > 0 ? ", steps were skipped" : "");
}

/* Updates before the norm was known, and what checksums took. */
static void
show_updates(const train_run *r, const spw_store_stats *stats)
{
    const uint64_t updates = stats->updates - stats->undone;
    char no_room[64] = "", twice[64] = "", bytes[32];
    if (stats->no_room > 0)
        snprintf(no_room, sizeof no_room, "; %llu had no room in their logs", (unsigned long long)stats->no_room);
    if (r->twice_steps > 0)
        snprintf(twice, sizeof twice, "; %llu steps were computed twice", (unsigned long long)r->twice_steps);
    if (spw_engine_plan(r->engine)->ahead && updates > 0)
        printf("  before the norm  %.1f%% of %llu updates of chunks; %llu were taken back, in %llu steps%s%s\n",
               100.0 * (double)stats->ahead / (double)updates, (unsigned long long)updates,
               (unsigned long long)stats->undone, (unsigned long long)r->undone_steps, twice, no_room);
    if (stats->checked_bytes > 0 && r->sum.cpu_s > 0)
        printf("  integrity        %s checked, %.1f%% of the processor time\n",
               spw_format_bytes(bytes, sizeof bytes, stats->checked_bytes),
               100 * (double)stats->checksum_ns * 1e-9 / r->sum.cpu_s);
}

static void
show_memory(const train_run *r)
{
    const spw_plan *p = spw_engine_plan(r->engine);
    const bool apart = !spw_gpu_get_info(spw_engine_gpu(r->engine))->host_addressable;
    char accounted[32], measured[32], planned[32];
    printf("  peak memory      %s accounted, %s measured by the kernel%s, %s planned\n",
           spw_format_bytes(accounted, sizeof accounted, cli_train_memory_peak(r)),
           spw_format_bytes(measured, sizeof measured, spw_process_rss_peak_bytes()),
           p->local_ranks > 1 ? " with what was read of other ranks'" : "",
           spw_format_bytes(planned, sizeof planned, p->host_bytes + (apart ? 0 : p->device_bytes)));
    if (apart)
        printf("  of the device    %s, %s planned\n",
               spw_format_bytes(accounted, sizeof accounted, spw_gpu_bytes_peak(spw_engine_gpu(r->engine))),
               spw_format_bytes(planned, sizeof planned, p->device_bytes));
}

static void
show_wear(const train_run *r, double steps)
{
    const uint64_t tokens = r->sum.tokens > 0 ? r->sum.tokens : 1;
    char all[32], each[32], token[32];
    printf("  disk wear        wrote %s to swap, %s a step, %s a token", spw_format_bytes(all, sizeof all, r->written),
           spw_format_bytes(each, sizeof each, (uint64_t)((double)r->steps_wrote / steps)),
           spw_format_bytes(token, sizeof token, r->steps_wrote / tokens));
    if (r->config.run.tbw > 0)
        printf(", %.4f %% of the disk's rated %.4g TB", 100 * (double)r->written / (double)r->config.run.tbw,
               (double)r->config.run.tbw * 1e-12);
    printf("\n");
}

void
cli_train_show_end(train_run *r)
{
    const double steps = r->steps_done > 0 ? (double)r->steps_done : 1, wall = r->sum.step_s > 0 ? r->sum.step_s : 1;
    spw_store_stats stats;
    spw_store_get_stats(spw_engine_store(r->engine), &stats);
    printf("\n%llu steps in %.1f s, %llu tokens, %.0f tokens/s; loss %.4f -> %.4f\n", (unsigned long long)r->steps_done,
           (double)(spw_now_ns() - r->begin_ns) * 1e-9, (unsigned long long)r->sum.tokens, (double)r->sum.tokens / wall,
           r->first_loss, r->last_loss);
    show_links(r, steps);
    show_time(r, wall);
    show_bounds(r, steps, wall, &stats);
    show_updates(r, &stats);
    spw_plan_print(spw_engine_plan(r->engine), print_line, NULL);
    show_memory(r);
    show_wear(r, steps);
    if (r->last_checkpoint[0] != '\0')
        printf("  checkpoint       %s\n", r->last_checkpoint);
}

void
cli_train_show_way_on(const train_run *r, const char *found)
{
    const char *from = r->last_checkpoint[0] != '\0' ? r->last_checkpoint : found;
    const char *folder = r->config.run.checkpoint_dir;
    char again[SPW_PATH_BYTES];
    spw_error ignored = {0};
    if (r->steps_done == 0 || (folder[0] == '\0' && from[0] == '\0'))
        return;
    fprintf(stderr, "spillway: training ended after step %llu of %llu", (unsigned long long)r->at.step,
            (unsigned long long)r->config.run.steps);
    if (from[0] == '\0')
        fprintf(stderr, ", and no checkpoint of it is complete\n");
    else if (!r->from_foreign && spw_checkpoint_find(from, again, &ignored) != SPW_OK)
        fprintf(stderr, ", and its last checkpoint, %s, is not there any more\n", from);
    else
        fprintf(stderr, "; to go on from its newest complete checkpoint: --resume %s\n", from);
}
