/*
 * spillway plan: says before a run where every byte will live, what a step moves over each link, how long it takes and
 * why, from the same plan that train makes; and the table of memory per device of the ZeRO paper. It takes nothing and
 * leaves nothing behind but caches: measured rates, and tokens of text that train would make and will find.
 */
#include "cli.h"
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { OVERRIDES_MAX = 256, LIST_MAX = 16, GIVEN_MAX = 32 };

/* A rate that is given, in place of what was measured. */
typedef struct given_rate {
    spw_resource resource;
    double value; /* bytes, parameters or operations a second */
} given_rate;

typedef struct job {
    const char *path, *overrides[OVERRIDES_MAX];
    uint32_t override_count;
    bool json, calibrate, no_measure, faster, table;
    double params, ranks[LIST_MAX], mp[LIST_MAX];
    uint32_t rank_count, mp_count;
    uint64_t hosts; /* 0: not said */
    const spw_gpu_spec *gpu;
    given_rate given[GIVEN_MAX];
    uint32_t given_count;
} job;

static void
to_file(void *ctx, const char *text)
{
    fprintf(ctx, "%s\n", text);
}

/* ---------------------------------------------------------------- what does not fit */

/* 'a.b=c' as a shell takes it: in single quotes when it has anything but the plainest characters. */
static void
print_set(FILE *f, const char *set)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-=/,:+";
    if (strspn(set, plain) == strlen(set)) {
        fprintf(f, " --set %s", set);
        return;
    }
    fputs(" --set '", f);
    for (const char *c = set; *c != '\0'; c++) {
        if (*c == '\'')
            fputs("'\\''", f);
        else
            fputc(*c, f);
    }
    fputc('\'', f);
}

/* Of a machine that is not this one, for a GPU that need not be here: what is given of its memory. 0: as this one has. */
static uint64_t
room_elsewhere(const spw_gpu_spec *gpu, const spw_config *config)
{
    return gpu != NULL && config->run.host_memory != SPW_AUTO ? config->run.host_memory : 0;
}

static bool
suggest(const spw_config *config, const spw_model *model, const spw_plan *plan, spw_suggestion *out)
{
    spw_error err = {0};
    return spw_plan_nearest(&(spw_engine_options){.config = config,
                                                  .gpu = plan->gpu,
                                                  .room_bytes = room_elsewhere(plan->gpu, config),
                                                  .model = model,
                                                  .local_ranks = plan->local_ranks,
                                                  .process_bytes = plan->process_host,
                                                  .weights_from = spw_config_start_folder(config)},
                            out, &err) == SPW_OK;
}

static void
print_suggestion(FILE *f, const spw_config *config, const spw_plan *plan, const spw_suggestion *s)
{
    char bytes[32];
    if (s->found && s->count > 0) {
        fputs("it fits with:", f);
        for (uint32_t i = 0; i < s->count; i++)
            print_set(f, s->set[i]);
        fputc('\n', f);
        return;
    }
    if (s->found)
        fputs("by itself, and in what is free now, it fits as it is: what other ranks have room for decides, too", f);
    else
        fprintf(f, "no other placement fits%s",
                s->lossy_would ? " but with the lossy spillway.state_format split24-int8" : "");
    if (plan->lack == SPW_LACK_ROOM)
        fprintf(f, "; as it is, it needs a machine with %s of free memory%s\n",
                spw_format_bytes(bytes, sizeof bytes, plan->least_bytes),
                config->run.ranks > 1 ? " for each rank on it" : "");
    else if (plan->least_bytes > 0)
        fprintf(f, "; as it is, it fits with: --set spillway.%s_memory=%llu  (%s)\n",
                plan->lack == SPW_LACK_DEVICE ? "device" : "host", (unsigned long long)plan->least_bytes,
                spw_format_bytes(bytes, sizeof bytes, plan->least_bytes));
    else
        fputc('\n', f);
}

void
cli_show_no_fit(const spw_config *config, const spw_model *model, const spw_plan *plan)
{
    static spw_suggestion s;
    spw_plan_print(plan, to_file, stderr);
    if (suggest(config, model, plan, &s))
        print_suggestion(stderr, config, plan, &s);
}

/* ---------------------------------------------------------------- as text */

static void
print_links(const spw_plan *p, const spw_rates *rates, const spw_prediction *x)
{
    const spw_resource no_rate = SPW_RESOURCE_COUNT;
    const double far = (double)(p->gathered.far + p->reduced.far);
    const struct {
        const char *name;
        double amount;
        const char *unit;
        spw_resource resource;
    } rows[] = {
        {"nvme read", (double)x->traffic.nvme_read, "B", SPW_RESOURCE_NVME_READ},
        {"nvme write", (double)x->traffic.nvme_write, "B", SPW_RESOURCE_NVME_WRITE},
        {"nvme, both ways", (double)x->traffic.nvme_read + (double)x->traffic.nvme_write, "B", SPW_RESOURCE_NVME},
        {"h2d", (double)x->traffic.h2d, "B", SPW_RESOURCE_H2D},
        {"d2h", (double)x->traffic.d2h, "B", SPW_RESOURCE_D2H},
        {"gathered from ranks", (double)p->gathered.all, "B", no_rate},
        {"reduced from ranks", (double)p->reduced.all, "B", no_rate},
        {"both, within the host", (double)(p->gathered.all + p->reduced.all) - far, "B", SPW_RESOURCE_RANKS},
        {"all ranks', from hosts", far * p->local_ranks, "B", SPW_RESOURCE_NETWORK},
        {"compute", p->flops, "FLOP", SPW_RESOURCE_COMPUTE},
        {"optimizer", (double)(p->trained - p->trained_device), "params", SPW_RESOURCE_OPTIMIZER},
        {"all on these CPUs", 0, "", SPW_RESOURCE_CPU}};
    printf("\n  %-24s %16s %12s %12s %14s\n", "a step", "", "per param", "seconds", "rate");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char amount[32] = "", each[32] = "", seconds[32] = "?", rate[40] = "";
        bool bytes = rows[i].unit[0] == 'B', rated = rows[i].resource != no_rate;
        bool between = !rated || rows[i].resource == SPW_RESOURCE_RANKS || rows[i].resource == SPW_RESOURCE_NETWORK;
        double s = rated ? x->seconds[rows[i].resource] : NAN;
        if (between && p->ranks == 1)
            continue;
        if (rows[i].resource == SPW_RESOURCE_CPU && (rates == NULL || rates->shared_cores == 0))
            continue;
        if (bytes)
            spw_format_bytes(amount, sizeof amount, (uint64_t)rows[i].amount);
        else if (rows[i].amount > 0)
            snprintf(amount, sizeof amount, "%.3g %s", rows[i].amount, rows[i].unit);
        if (bytes)
            snprintf(each, sizeof each, "%.2f B", rows[i].amount / (double)p->params);
        if (!isnan(s))
            snprintf(seconds, sizeof seconds, "%.4g%s", s, x->timed && rows[i].resource == x->bound ? " *" : "");
        if (s > 0 && rows[i].amount > 0)
            snprintf(rate, sizeof rate, bytes ? "%.2f GB/s" : "%.3g G/s", rows[i].amount / s * 1e-9);
        printf("  %-24s %16s %12s %12s %14s\n", rows[i].name, amount, each, rates == NULL || !rated ? "" : seconds,
               rate);
    }
}

/* At once: those that are there while a run is under way, of which frozen weights are one file. */
static void
print_checkpoints(const spw_config *c, const spw_engine *e)
{
    uint64_t count = cli_checkpoints_at_once(c, NULL);
    char a[32], b[32];
    if (count == 0)
        return;
    printf("  checkpoints: %s each", spw_format_bytes(a, sizeof a, spw_checkpoint_disk_bytes(e, 1)));
    if (count > 1)
        printf(", %llu at once take %s", (unsigned long long)count,
               spw_format_bytes(b, sizeof b, spw_checkpoint_disk_bytes(e, count)));
    printf("\n");
}

static void
print_times(const job *j, const spw_plan *p, const spw_rates *rates, const spw_prediction *x, const spw_calibration *c,
            uint64_t tbw)
{
    char a[32], b[32];
    if (rates == NULL) {
        printf("  times are not predicted: --no-measure\n");
    } else if (!x->timed) {
        printf("  times are not predicted: a rate is not known\n");
    } else {
        const bool gated = x->gated_s > 1.005 * x->bound_s;
        printf("  predicted step %.4g s, bound by %s (*)%s; %.*f tokens/s, %.3g days per 10^9 tokens\n", x->step_s,
               spw_resource_name(x->bound),
               !gated    ? ""
               : p->late ? " beside the backward pass"
                         : " and by the norm's gate",
               x->tokens_per_s < 10 ? 2 : 0, x->tokens_per_s, 1e9 / x->tokens_per_s / 86400);
        if (gated && p->late)
            printf("  late updates have the backward pass: the forward pass, then the longer of it and them\n");
        else if (gated)
            printf("  updates wait for the gradient's norm: the backward pass, then the longer of them and the next "
                   "forward "
                   "pass\n");
        if (x->clipped_s > 1.05 * x->step_s)
            printf("  %.4g s while the gradient's norm is above gradient_clipping in every step: then no update begins "
                   "before it is known\n",
                   x->clipped_s);
        printf("  the bound is the longest of them: a step takes longer by what does not overlap; --faster looks "
               "for settings that shorten it\n");
    }
    if (rates != NULL && isnan(x->seconds[SPW_RESOURCE_RANKS]))
        printf(
            "  how fast ranks of a host reach each other is in no time here: spillway bench comm -n %u measures it\n",
            p->local_ranks);
    if (p->gathered.far + p->reduced.far > 0 && isnan(x->seconds[SPW_RESOURCE_NETWORK])) {
        const double bytes = (double)(p->gathered.far + p->reduced.far) * p->local_ranks;
        printf("  the network is in no time here: the %u rank%s of a host receive%s %s a step from other hosts, %.3g s "
               "at 10 Gbit/s,\n  %.3g s at 100; spillway bench comm, started as train will be, measures it, and "
               "--rate network=12.5 takes 100 Gbit/s as given\n",
               p->local_ranks, p->local_ranks > 1 ? "s" : "", p->local_ranks > 1 ? "" : "s",
               spw_format_bytes(a, sizeof a, (uint64_t)bytes), bytes * 8e-10, bytes * 8e-11);
    }
    if (rates != NULL) {
        printf("  rates: %u measured in %.1f s, %u from the cache%s%s%s", c->measured, c->seconds, c->cached,
               c->cache_path[0] != '\0' ? " (" : ", which has no place here", c->cache_path,
               c->cache_path[0] != '\0' ? ")" : "");
        if (c->estimated)
            printf(", of %s estimated: half of its peak, %.3g GB/s to and from the host", p->gpu->title,
                   p->gpu->link * 1e-9);
        for (uint32_t i = 0; i < j->given_count; i++)
            printf("%s %s", i > 0 ? "," : ", given:", spw_resource_name(j->given[i].resource));
        printf("\n");
    }
    printf("  disk wear: %s written a step", spw_format_bytes(a, sizeof a, x->traffic.nvme_write));
    if (x->timed)
        printf(", %s a day", spw_format_bytes(b, sizeof b, (uint64_t)fmin(x->written_per_day, 1e19)));
    if (x->timed && tbw > 0 && isfinite(x->tbw_years))
        printf(", spillway.tbw (%s) in %.3g years", spw_format_bytes(a, sizeof a, tbw), x->tbw_years);
    printf("\n");
    for (uint32_t i = 0; p->path_count > 1 && i < p->path_count; i++)
        printf("    %s: %s read, %s written a step\n", p->paths[i],
               spw_format_bytes(a, sizeof a, x->traffic.path_read[i]),
               spw_format_bytes(b, sizeof b, x->traffic.path_write[i]));
}

static void
print_faster(const spw_faster *faster, const spw_prediction *x)
{
    if (!x->timed)
        return;
    if (faster->count == 0)
        printf("\n  no change of placement, budgets or schedule is predicted to shorten a step by 2 %% here\n");
    else
        printf("\n  shorter steps with the same bits, by these rates, each change on top of those above\n");
    for (uint32_t i = 0; i < faster->count; i++) {
        const spw_faster_change *c = &faster->changes[i];
        printf("  %.4g s", c->step.step_s);
        if (c->step.clipped_s > 1.05 * c->step.step_s)
            printf(" (%.4g s while every step clips)", c->step.clipped_s);
        printf(", %.2f of the step above: ", c->step.step_s / x->step_s);
        for (uint32_t k = 0; k < c->set_count; k++)
            print_set(stdout, c->set[k]);
        printf("\n");
    }
}

static void
print_decisions(const spw_plan *p)
{
    printf("\n  decided here\n");
    for (uint32_t i = 0; i < p->decision_count; i++)
        printf("  %-30s %-24s %s\n", p->decisions[i].name, p->decisions[i].value, p->decisions[i].reason);
}

/* ---------------------------------------------------------------- as JSON */

static json_t *
number(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static json_t *
integer(uint64_t x)
{
    return x == SPW_AUTO ? json_string("auto") : json_integer((json_int_t)x);
}

static json_t *
tiers_json(uint64_t device, uint64_t host, uint64_t nvme)
{
    return json_pack("{s:o, s:o, s:o}", "device", integer(device), "host", integer(host), "nvme", integer(nvme));
}

static json_t *
plan_json(const spw_plan *p)
{
    json_t *purposes = json_object(), *decisions = json_array(), *paths = json_array();
    json_object_set_new(purposes, "weights", tiers_json(p->weight_device, p->weight_host, p->weight_nvme));
    json_object_set_new(purposes, "records", tiers_json(p->record_device, p->record_host, p->record_nvme));
    json_object_set_new(purposes, "gradients",
                        tiers_json(p->grads_device + p->grad_device, p->grad_host, p->grad_nvme));
    json_object_set_new(purposes, "slots", tiers_json(0, p->slots_host, 0));
    json_object_set_new(purposes, "gathered", tiers_json(p->cache_device + p->parts_device, 0, 0));
    json_object_set_new(purposes, "activations",
                        tiers_json(p->activations_device, p->activations_host, p->activations_nvme));
    json_object_set_new(purposes, "tapes", tiers_json(p->tapes_device, 0, 0));
    json_object_set_new(purposes, "ranks", tiers_json(0, p->wire_host, 0));
    json_object_set_new(purposes, "kept", tiers_json(0, p->kept_host, 0));
    json_object_set_new(purposes, "working", tiers_json(p->arena_device + p->batch_device + p->padding_device, 0, 0));
    json_object_set_new(purposes, "tables", tiers_json(0, p->tables_host, 0));
    json_object_set_new(purposes, "process", tiers_json(0, p->process_host, 0));
    json_object_set_new(purposes, "spare", tiers_json(0, p->spare_host, p->spare_nvme));
    for (uint32_t i = 0; i < p->decision_count; i++)
        json_array_append_new(decisions, json_pack("{s:s, s:s, s:s}", "name", p->decisions[i].name, "value",
                                                   p->decisions[i].value, "reason", p->decisions[i].reason));
    for (uint32_t i = 0; i < p->path_count; i++)
        json_array_append_new(paths, json_pack("{s:s, s:o, s:f}", "path", p->paths[i], "bytes",
                                               integer(p->path_bytes[i]), "weight", p->path_weight[i]));
    return json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "params", integer(p->params), "bytes", purposes, "total",
        tiers_json(p->device_bytes, p->host_bytes,
                   p->weight_nvme + p->record_nvme + p->grad_nvme + p->activations_nvme + p->spare_nvme),
        "budget", tiers_json(p->device_budget, p->host_budget, SPW_AUTO), "weight_slots", integer(p->weight_slots),
        "record_slots", integer(p->record_slots), "paths", paths, "decisions", decisions, "tokens", integer(p->tokens));
}

/* What train holds when it plans: the same data and batches, so that the process counts for the same bytes. */
typedef struct run {
    spw_config config;
    spw_data *data;
    spw_model *model;
    spw_engine *engine;
    int32_t *tokens, *targets;
    bool wants_faster;
    spw_faster faster;
} run;

static json_t *
faster_json(const spw_faster *faster)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < faster->count; i++) {
        const spw_faster_change *c = &faster->changes[i];
        json_t *sets = json_array();
        for (uint32_t k = 0; k < c->set_count; k++)
            json_array_append_new(sets, json_string(c->set[k]));
        json_array_append_new(list, json_pack("{s:o, s:o, s:o}", "set", sets, "step_s", number(c->step.step_s),
                                              "clipped_s", number(c->step.clipped_s)));
    }
    return list;
}

static void
print_json(const run *r, const spw_plan *p, const spw_rates *rates, const spw_prediction *x, const spw_calibration *c,
           const spw_suggestion *s, const spw_error *err)
{
    json_t *root = plan_json(p), *seconds = json_object(), *sets = json_array();
    const uint64_t saved = cli_checkpoints_at_once(&r->config, NULL);
    char *text;
    json_object_set_new(root, "fits", json_boolean(err->status == SPW_OK));
    json_object_set_new(root, "gpu", p->gpu != NULL ? json_string(p->gpu->name) : json_null());
    if (err->status == SPW_OK) {
        for (int k = 0; k < SPW_RESOURCE_COUNT; k++)
            json_object_set_new(seconds, spw_resource_name((spw_resource)k), number(x->seconds[k]));
        json_object_set_new(root, "step",
                            json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "nvme_read",
                                      integer(x->traffic.nvme_read), "nvme_write", integer(x->traffic.nvme_write),
                                      "h2d", integer(x->traffic.h2d), "d2h", integer(x->traffic.d2h), "gather",
                                      integer(p->gathered.all), "reduce", integer(p->reduced.all), "gather_hosts",
                                      integer(p->gathered.far), "reduce_hosts", integer(p->reduced.far)));
        json_object_set_new(root, "seconds", seconds);
        json_object_set_new(root, "step_s", number(x->timed ? x->step_s : NAN));
        json_object_set_new(root, "bound_s", number(x->timed ? x->bound_s : NAN));
        json_object_set_new(root, "gated_s", number(x->timed ? x->gated_s : NAN));
        json_object_set_new(root, "clipped_s", number(x->timed ? x->clipped_s : NAN));
        json_object_set_new(root, "bound_by", x->timed ? json_string(spw_resource_name(x->bound)) : json_null());
        json_object_set_new(root, "tokens_per_s", number(x->tokens_per_s));
        json_object_set_new(root, "written_per_day", number(x->written_per_day));
        json_object_set_new(root, "tbw_years", number(x->tbw_years));
        json_object_set_new(root, "checkpoints",
                            json_pack("{s:o, s:o, s:o}", "each", integer(spw_checkpoint_disk_bytes(r->engine, 1)),
                                      "at_once", integer(saved), "bytes",
                                      integer(spw_checkpoint_disk_bytes(r->engine, saved > 0 ? saved : 1))));
        json_object_set_new(root, "rates",
                            rates == NULL ? json_null()
                                          : json_pack("{s:i, s:i, s:i, s:b, s:f}", "measured", (int)c->measured,
                                                      "cached", (int)c->cached, "unknown", (int)c->unknown, "estimated",
                                                      (int)c->estimated, "seconds", c->seconds));
        if (r->wants_faster)
            json_object_set_new(root, "faster", faster_json(&r->faster));
        json_decref(sets);
    } else {
        for (uint32_t i = 0; i < s->count; i++)
            json_array_append_new(sets, json_string(s->set[i]));
        json_object_set_new(root, "error", json_string(err->message));
        json_object_set_new(root, "needs", integer(p->least_bytes));
        json_object_set_new(root, "fits_with", s->found ? sets : json_null());
        if (!s->found)
            json_decref(sets);
        json_object_set_new(root, "lossy_format_would_fit", json_boolean(s->lossy_would));
        json_decref(seconds);
    }
    text = json_dumps(root, JSON_INDENT(1) | JSON_REAL_PRECISION(17));
    if (text != NULL)
        puts(text);
    free(text);
    json_decref(root);
}

/* ---------------------------------------------------------------- the command */

static void
load_data(run *r)
{
    const spw_config *c = &r->config;
    uint64_t batches = c->accumulation > c->run.eval_batches ? c->accumulation : c->run.eval_batches;
    spw_error err = {0};
    if (spw_config_open_data(&r->data, c, &err) != SPW_OK)
        fprintf(stderr, "spillway: warning: planned without the data: %s\n", err.message);
    r->tokens = spw_mem_calloc(batches * c->micro_batch * c->data.seq_length, sizeof(int32_t));
    r->targets = spw_mem_calloc(batches * c->micro_batch * c->data.seq_length, sizeof(int32_t));
}

/* The layout of conversations where the tokenizer's tokens decided: "auto: NAME, REASON". */
static void
add_chat(spw_plan *p, const char *says)
{
    spw_decision *d = &p->decisions[p->decision_count];
    const char *name = says + strlen("auto: "), *comma = strchr(says, ',');
    if (strncmp(says, "auto: ", strlen("auto: ")) != 0 || comma == NULL || p->decision_count == SPW_DECISIONS_MAX)
        return;
    p->decision_count++;
    snprintf(d->name, sizeof d->name, "data.chat");
    snprintf(d->value, sizeof d->value, "%.*s", (int)(comma - name), name);
    snprintf(d->reason, sizeof d->reason, "%s", comma + 2);
}

const char *
cli_rope_choice(const spw_config *c, char reason[160])
{
    bool beyond = c->data.seq_length > c->model.rope_positions;
    snprintf(reason, 160, "windows of %llu tokens are %s the model's original %llu",
             (unsigned long long)c->data.seq_length, beyond ? "longer than" : "within",
             (unsigned long long)c->model.rope_positions);
    return c->model.rope != SPW_ROPE_LONG ? NULL : beyond ? "long_factor" : "short_factor";
}

void
cli_warn_of_length(const spw_config *c)
{
    if (c->data.seq_length > c->model.positions)
        fprintf(stderr,
                "spillway: warning: data.seq_length %llu is more than the model's %llu positions "
                "(max_position_embeddings), which eval, generate and other programs keep to\n",
                (unsigned long long)c->data.seq_length, (unsigned long long)c->model.positions);
}

static void
add_rope(spw_plan *p, const spw_config *c)
{
    spw_decision *d = &p->decisions[p->decision_count];
    char reason[160];
    const char *choice = cli_rope_choice(c, reason);
    if (choice == NULL || p->decision_count == SPW_DECISIONS_MAX)
        return;
    p->decision_count++;
    snprintf(d->name, sizeof d->name, "rope");
    snprintf(d->value, sizeof d->value, "%s", choice);
    snprintf(d->reason, sizeof d->reason, "%s", reason);
}

/* What of the disk swap takes, of all ranks here. */
static uint64_t
swap_on(const spw_plan *p, dev_t disk)
{
    struct stat info;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < p->path_count; i++) {
        if (stat(p->paths[i], &info) == 0 && info.st_dev == disk)
            bytes += p->path_bytes[i] * (p->path_ranks[i] > 0 ? p->path_ranks[i] : 1);
    }
    return bytes;
}

/* Of the disk that checkpoints go to. */
static uint64_t
swap_beside(const spw_config *c, const spw_plan *p)
{
    char path[SPW_PATH_BYTES];
    struct stat info;
    cli_nearest(path, c->run.checkpoint_dir);
    return stat(path, &info) == 0 ? swap_on(p, info.st_dev) : 0;
}

/* Of all swap folders of a file system, and all ranks here, once. What a killed run left there is removed by the next one, which is not foreseen. */
static void
warn_of_swap_room(const spw_plan *p, uint32_t path_idx)
{
    char a[32], b[32];
    struct stat here, other;
    struct statvfs fs;
    uint64_t need, room;
    if (stat(p->paths[path_idx], &here) != 0 || statvfs(p->paths[path_idx], &fs) != 0 || fs.f_blocks == 0)
        return;
    for (uint32_t i = 0; i < path_idx; i++) {
        if (stat(p->paths[i], &other) == 0 && other.st_dev == here.st_dev)
            return;
    }
    need = swap_on(p, here.st_dev);
    room = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (need > room)
        fprintf(stderr,
                "spillway: warning: train will not start here unless room is made: swap takes %s of the disk of %s, "
                "which has %s free\n",
                spw_format_bytes(a, sizeof a, need), p->paths[path_idx], spw_format_bytes(b, sizeof b, room));
}

/* A plan may be for another machine; here is where it would be refused: a folder in which nothing is to lie is not looked at. */
static void
warn_of_folders(const spw_config *c, const spw_engine *e, const spw_plan *p)
{
    spw_error err = {0};
    struct stat info;
    for (uint32_t i = 0; i < p->path_count; i++) {
        const char *why = stat(p->paths[i], &info) != 0           ? strerror(errno)
                          : !S_ISDIR(info.st_mode)                ? "not a folder"
                          : access(p->paths[i], W_OK | X_OK) != 0 ? strerror(errno)
                                                                  : NULL;
        if (why != NULL && p->path_bytes[i] > 0)
            fprintf(stderr, "spillway: warning: train will not start here: folder %s: %s\n", p->paths[i], why);
        else
            warn_of_swap_room(p, i);
    }
    if (c->run.checkpoint_dir[0] == '\0')
        return;
    if (cli_check_folder("spillway.checkpoint_dir", c->run.checkpoint_dir, &err) != SPW_OK)
        fprintf(stderr, "spillway: warning: train will not start here: %s\n", err.message);
    else
        cli_warn_of_full_disk(c, e, NULL, swap_beside(c, p));
}

/* What train's process will be before its memory is taken: it has data and checkpoints open besides. */
static uint64_t
process_of_train(void)
{
    return spw_round_up(spw_process_rss_bytes(), 1 << 20) + (1 << 20);
}

/* How many of the ranks are on each host. */
static spw_status
ranks_of_hosts(const job *j, const spw_config *c, uint32_t *out, spw_error *err)
{
    *out = j->hosts > 0 ? (uint32_t)(c->run.ranks / j->hosts) : 0;
    return j->hosts == 0 || (*out > 0 && *out * j->hosts == c->run.ranks)
               ? SPW_OK
               : SPW_RAISE(err, SPW_ECONFIG,
                           "--hosts %llu: spillway.ranks is %u, which does not make equally many on each host "
                           "(--set spillway.ranks=N)",
                           (unsigned long long)j->hosts, c->run.ranks);
}

/* In the place of all that a resource takes; of nvme both ways too. */
static void
give_rate(spw_rates *r, const given_rate *given)
{
    const double v = given->value;
    const int way = given->resource == SPW_RESOURCE_NETWORK ? SPW_WAY_FAR : SPW_WAY_NEAR;
    switch (given->resource) {
    case SPW_RESOURCE_COMPUTE: r->flops = r->orthogonal = v; break;
    case SPW_RESOURCE_OPTIMIZER: r->optimizer = v; break;
    case SPW_RESOURCE_H2D: r->h2d = v; break;
    case SPW_RESOURCE_D2H: r->d2h = v; break;
    case SPW_RESOURCE_RANKS:
    case SPW_RESOURCE_NETWORK:
        for (int use = 0; use < SPW_USE_COUNT; use++)
            r->received[way][use] = v;
        break;
    default:
        for (uint32_t i = 0; i < SPW_PATHS_MAX; i++) {
            r->nvme_read[i] = given->resource != SPW_RESOURCE_NVME_WRITE ? v : r->nvme_read[i];
            r->nvme_write[i] = given->resource != SPW_RESOURCE_NVME_READ ? v : r->nvme_write[i];
            r->nvme_mixed[i] = given->resource == SPW_RESOURCE_NVME ? v : r->nvme_mixed[i];
        }
        break;
    }
}

static void
add_gpu(spw_plan *p)
{
    spw_decision *d = &p->decisions[p->decision_count];
    if (p->gpu == NULL || p->decision_count == SPW_DECISIONS_MAX)
        return;
    p->decision_count++;
    snprintf(d->name, sizeof d->name, "device");
    snprintf(d->value, sizeof d->value, "%s", p->gpu->name);
    snprintf(d->reason, sizeof d->reason, "planned for: %s, sm_%u, which need not be here", p->gpu->title,
             p->gpu->capability);
}

static int
plan_config(const job *j)
{
    static run r;
    static spw_plan plan;
    static spw_suggestion s;
    spw_engine_options options = {
        .config = &r.config, .model = NULL, .plan_only = true, .kept_rates = true, .gpu = j->gpu, .plan_out = &plan};
    spw_calibration calibration = {0};
    spw_prediction x;
    spw_rates rates;
    spw_error err = {0};
    uint32_t local_ranks = 0;
    spw_status st;
    int rc;
    if (spw_config_load(&r.config, j->path, j->overrides, j->override_count, &err) != SPW_OK ||
        ranks_of_hosts(j, &r.config, &local_ranks, &err) != SPW_OK) {
        cli_fail(&err);
        return EXIT_USAGE;
    }
    load_data(&r);
    st = spw_model_from_config(&r.model, &r.config, &err);
    options.model = r.model;
    options.local_ranks = local_ranks;
    options.process_bytes = process_of_train();
    options.room_bytes = room_elsewhere(j->gpu, &r.config);
    options.weights_from = spw_config_start_folder(&r.config);
    if (st == SPW_OK)
        st = spw_engine_create(&r.engine, &options, &err);
    if (st == SPW_OK && !j->no_measure)
        spw_calibrate(&rates, &r.config, &plan, j->calibrate ? SPW_CALIBRATE_FORCE : SPW_CALIBRATE_AUTO, &calibration);
    for (uint32_t i = 0; i < j->given_count; i++)
        give_rate(&rates, &j->given[i]);
    if ((calibration.measured > 0 || j->given_count > 0) && plan.device_apart && plan.ranks <= 1 &&
        st == SPW_OK) { /* from now on training chooses by what was measured, and may choose otherwise */
        spw_engine_destroy(r.engine);
        options.rates = j->given_count > 0 ? &rates : NULL;
        st = spw_engine_create(&r.engine, &options, &err);
    }
    if (st == SPW_OK) {
        spw_plan_predict(&plan, j->no_measure ? NULL : &rates, r.config.run.tbw, &x);
        r.wants_faster = j->faster;
        if (j->faster)
            st = spw_plan_faster(&options, &plan, &rates, &r.faster, &err);
    }
    if (r.data != NULL)
        add_chat(&plan, spw_data_chat(r.data));
    add_rope(&plan, &r.config);
    add_gpu(&plan);
    if (st == SPW_OK) {
        warn_of_folders(&r.config, r.engine, &plan);
        cli_warn_of_length(&r.config);
    }
    if (st == SPW_ENOFIT)
        (void)suggest(&r.config, r.model, &plan, &s);
    if (j->json && (st == SPW_OK || st == SPW_ENOFIT)) {
        print_json(&r, &plan, j->no_measure ? NULL : &rates, &x, &calibration, &s, &err);
    } else if (st == SPW_OK || st == SPW_ENOFIT) {
        spw_plan_print(&plan, to_file, stdout);
        if (st == SPW_OK) {
            print_links(&plan, j->no_measure ? NULL : &rates, &x);
            print_times(j, &plan, j->no_measure ? NULL : &rates, &x, &calibration, r.config.run.tbw);
            print_checkpoints(&r.config, r.engine);
        }
        print_decisions(&plan);
        if (st == SPW_OK && j->faster)
            print_faster(&r.faster, &x);
        if (st == SPW_ENOFIT)
            print_suggestion(stdout, &r.config, &plan, &s);
    }
    spw_engine_destroy(r.engine);
    spw_model_destroy(r.model);
    spw_data_close(r.data);
    spw_mem_free(r.tokens);
    spw_mem_free(r.targets);
    if (st == SPW_OK)
        return EXIT_DONE;
    rc = cli_fail(&err);
    if (st == SPW_EUNSUPPORTED && j->gpu == NULL && strncmp(r.config.run.device, "cuda", 4) == 0)
        fprintf(stderr, "spillway plan --gpu NAME, such as h100 or rtx4090, plans for a GPU that is not here\n");
    return rc;
}

static void
print_gb(double bytes)
{
    printf(bytes * 1e-9 < 9.995 ? " %9.2f" : bytes * 1e-9 < 99.95 ? " %9.1f" : " %9.0f", bytes * 1e-9);
}

static int
print_table(const job *j)
{
    static const char *const names[] = {"0: all copied", "1: state", "2: + gradients", "3: + weights"};
    for (uint32_t m = 0; m < j->mp_count; m++) {
        printf("%s# GB (10^9) per device, %g parameters, model parallelism %g, mixed-precision Adam (16 bytes each)\n",
               m > 0 ? "\n" : "", j->params, j->mp[m]);
        printf("  %8s", "ranks");
        for (uint32_t stage = 0; stage < 4; stage++)
            printf(" %14s", names[stage]);
        printf("\n");
        for (uint32_t i = 0; i < j->rank_count; i++) {
            printf("  %8.0f", j->ranks[i]);
            for (uint32_t stage = 0; stage < 4; stage++) {
                printf("     ");
                print_gb(spw_zero_bytes(j->params, stage, j->ranks[i], j->mp[m]));
            }
            printf("\n");
        }
    }
    return EXIT_DONE;
}

static bool
read_positive(const char *text, double *out)
{
    char *end;
    *out = strtod(text, &end);
    return end != text && *end == '\0' && *out > 0 && isfinite(*out);
}

static bool
read_number(const char *text, double most, double *out)
{
    return read_positive(text, out) && *out >= 1 && *out <= most;
}

static bool
read_gpu(const char *name, const spw_gpu_spec **out)
{
    uint32_t count;
    const spw_gpu_spec *all = spw_gpu_get_specs(&count);
    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(all[i].name, name) == 0) {
            *out = &all[i];
            return true;
        }
    }
    return false;
}

static int
tell_gpus(const char *name)
{
    char list[512] = "";
    uint32_t count;
    const spw_gpu_spec *all = spw_gpu_get_specs(&count);
    for (uint32_t i = 0; i < count; i++) {
        const size_t at = strlen(list);
        snprintf(list + at, sizeof list - at, "%s%s", i > 0 ? ", " : "", all[i].name);
    }
    return cli_usage("plan", "--gpu %s is not known; these are: %s", name, list);
}

/* NAME=NUMBER of a resource, in its unit. */
static bool
read_rate(const char *text, job *j)
{
    const char *value = strchr(text, '=');
    given_rate *g = &j->given[j->given_count];
    if (value == NULL || j->given_count == GIVEN_MAX || !read_positive(value + 1, &g->value) || g->value > 1e6)
        return false;
    for (int k = 0; k < SPW_RESOURCE_COUNT; k++) {
        const char *name = spw_resource_name((spw_resource)k);
        if (k == SPW_RESOURCE_CPU || strncmp(text, name, (size_t)(value - text)) != 0 ||
            strlen(name) != (size_t)(value - text))
            continue;
        g->resource = (spw_resource)k;
        g->value *= k == SPW_RESOURCE_COMPUTE ? 1e12 : 1e9;
        j->given_count++;
        return true;
    }
    return false;
}

static bool
read_list(const char *text, double out[LIST_MAX], uint32_t *count)
{
    char part[32];
    for (*count = 0; *count < LIST_MAX; text++) {
        size_t n = strcspn(text, ",");
        if (n == 0 || n >= sizeof part)
            return false;
        memcpy(part, text, n);
        part[n] = '\0';
        if (!read_number(part, 1e9, &out[*count]) || floor(out[*count]) != out[*count])
            return false;
        ++*count;
        text += n;
        if (*text == '\0')
            return true;
    }
    return false;
}

static int
parse(job *j, int argc, char **argv)
{
    bool table_option = false;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *v;
        bool ok = true;
        if (name[0] != '-') {
            if (j->path != NULL)
                return cli_usage("plan", "one configuration at a time, got %s too", name);
            j->path = name;
        } else if (strcmp(name, "--json") == 0) {
            j->json = true;
        } else if (strcmp(name, "--calibrate") == 0) {
            j->calibrate = true;
        } else if (strcmp(name, "--no-measure") == 0) {
            j->no_measure = true;
        } else if (strcmp(name, "--faster") == 0) {
            j->faster = true;
        } else if (strcmp(name, "--table") == 0) {
            j->table = true;
        } else if (strcmp(name, "--set") == 0 || strcmp(name, "--params") == 0 || strcmp(name, "--ranks") == 0 ||
                   strcmp(name, "--mp") == 0 || strcmp(name, "--hosts") == 0 || strcmp(name, "--gpu") == 0 ||
                   strcmp(name, "--rate") == 0) {
            if ((v = cli_value("plan", argc, argv, &i)) == NULL)
                return EXIT_USAGE;
            table_option = table_option || strcmp(name, "--params") == 0 || strcmp(name, "--ranks") == 0 ||
                           strcmp(name, "--mp") == 0;
            if (strcmp(name, "--hosts") == 0)
                ok = cli_number(v, &j->hosts) && j->hosts > 0;
            else if (strcmp(name, "--gpu") == 0)
                ok = read_gpu(v, &j->gpu);
            else if (strcmp(name, "--rate") == 0)
                ok = read_rate(v, j);
            else if (strcmp(name, "--params") == 0)
                ok = read_number(v, 1e18, &j->params);
            else if (strcmp(name, "--ranks") == 0)
                ok = read_list(v, j->ranks, &j->rank_count);
            else if (strcmp(name, "--mp") == 0)
                ok = read_list(v, j->mp, &j->mp_count);
            else if (j->override_count < OVERRIDES_MAX)
                j->overrides[j->override_count++] = v;
            else
                return cli_usage("plan", "more than %d times --set", OVERRIDES_MAX);
            if (!ok && strcmp(name, "--gpu") == 0)
                return tell_gpus(v);
            if (!ok && strcmp(name, "--rate") == 0)
                return cli_usage(
                    "plan",
                    "--rate %s: NAME=NUMBER with compute (TFLOP/s), optimizer (G params/s), or in GB/s nvme, "
                    "nvme_read, nvme_write, h2d, d2h, ranks, network; %d at most",
                    v, GIVEN_MAX);
            if (!ok)
                return cli_usage("plan", "%s cannot be %s", name, v);
        } else {
            return cli_usage("plan", "unknown option %s", name);
        }
    }
    if (j->table && (j->path != NULL || j->json || j->calibrate || j->no_measure || j->faster ||
                     j->override_count > 0 || j->hosts > 0 || j->gpu != NULL || j->given_count > 0))
        return cli_usage("plan", "--table takes --params, --ranks and --mp, and no configuration");
    if (!j->table && table_option)
        return cli_usage("plan", "--params, --ranks and --mp belong to --table");
    if (!j->table && j->path == NULL)
        return cli_usage("plan", "a configuration file is needed, or --table");
    if (j->calibrate && j->no_measure)
        return cli_usage("plan", "--calibrate or --no-measure, not both");
    if (j->given_count > 0 && j->no_measure)
        return cli_usage("plan", "--rate is for times, which --no-measure leaves out");
    if (j->faster && j->no_measure)
        return cli_usage("plan", "--faster compares times, which --no-measure leaves out");
    return -1;
}

int
cli_plan(int argc, char **argv)
{
    static job j = {.params = 7.5e9, .ranks = {1, 4, 16, 64, 256, 1024}, .rank_count = 6, .mp = {1}, .mp_count = 1};
    int rc = parse(&j, argc, argv);
    if (rc >= 0)
        return rc;
    return j.table ? print_table(&j) : plan_config(&j);
}
