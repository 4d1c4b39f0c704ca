/* What spillway plan shows: tables and times, as text or as one JSON object, and what would fit where something does not. */
#include "plan.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

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

uint64_t
cli_plan_room(const spw_gpu_spec *gpu, const spw_config *config)
{
    return gpu != NULL && config->run.host_memory != SPW_AUTO ? config->run.host_memory : 0;
}

bool
cli_plan_suggest(const spw_config *config, const spw_model *model, const spw_plan *plan, spw_suggestion *out)
{
    spw_error err = {0};
    return spw_plan_nearest(&(spw_engine_options){.config = config,
                                                  .gpu = plan->gpu,
                                                  .room_bytes = cli_plan_room(plan->gpu, config),
                                                  .model = model,
                                                  .local_ranks = plan->local_ranks,
                                                  .device_ranks = plan->device_ranks,
                                                  .process_bytes = plan->process_host,
                                                  .weights_from = spw_config_start_folder(config)},
                            out, &err) == SPW_OK;
}

static void
print_sets(FILE *f, const char *what, const spw_suggestion *s)
{
    fprintf(f, "%s:", what);
    for (uint32_t i = 0; i < s->count; i++)
        print_set(f, s->set[i]);
    fputc('\n', f);
}

static bool
is_limited(int kind)
{
    struct rlimit most;
    return getrlimit(kind, &most) == 0 && most.rlim_cur != RLIM_INFINITY;
}

static void
print_suggestion(FILE *f, const spw_config *config, const spw_plan *plan, const spw_suggestion *s)
{
    char bytes[32];
    if (s->found && s->count > 0) {
        print_sets(f, "it fits with", s);
        return;
    }
    if (s->found)
        fputs("by itself, and in what is free now, it fits as it is: what other ranks have room for decides, too", f);
    else
        fprintf(f, "no other placement fits%s",
                s->lossy_would ? " but with the lossy spillway.state_format split24-int8" : "");
    if (plan->lack == SPW_LACK_ROOM)
        fprintf(f, "; as it is, it needs a machine with %s of free memory%s%s\n",
                spw_format_bytes(bytes, sizeof bytes, plan->least_bytes),
                config->run.ranks > 1 ? " for each rank on it" : "",
                is_limited(RLIMIT_AS) || is_limited(RLIMIT_DATA)
                    ? ", or a larger ulimit -v or -d, which count what is mapped and not used, too: some 200 MiB for "
                      "each thread"
                    : "");
    else if (plan->least_bytes > 0)
        fprintf(f, "; as it is, it fits with: --set spillway.%s_memory=%llu  (%s)\n",
                plan->lack == SPW_LACK_DEVICE ? "device" : "host", (unsigned long long)plan->least_bytes,
                spw_format_bytes(bytes, sizeof bytes, plan->least_bytes));
    else
        fputc('\n', f);
    if (s->batch > 0) {
        fprintf(f, "with a batch of %llu in place of %llu sequences, which is another training, ",
                (unsigned long long)s->batch, (unsigned long long)config->train_batch_size);
        print_sets(f, "it fits with", s);
    }
}

void
cli_show_no_fit(const spw_config *config, const spw_model *model, const spw_plan *plan)
{
    static spw_suggestion s;
    spw_plan_print(plan, to_file, stderr);
    if (cli_plan_suggest(config, model, plan, &s))
        print_suggestion(stderr, config, plan, &s);
}

/* ---------------------------------------------------------------- as text */

static void
print_links(const spw_plan *p, const spw_rates *rates, const spw_prediction *x)
{
    const spw_resource no_rate = SPW_RESOURCE_COUNT;
    const double far = (double)(p->gathered.far + p->reduced.far + p->traded.far);
    const double all = (double)(p->gathered.all + p->reduced.all + p->traded.all);
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
        {"traded for attention", (double)p->traded.all, "B", no_rate},
        {"all, within the host", all - far, "B", SPW_RESOURCE_RANKS},
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
        if (between && (p->ranks == 1 || (rows[i].amount == 0 && strncmp(rows[i].name, "traded", 6) == 0)))
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
print_times(const plan_run *r)
{
    const spw_plan *p = &r->plan;
    const spw_rates *rates = r->rated ? &r->rates : NULL;
    const spw_prediction *x = &r->x;
    const spw_calibration *c = &r->calibration;
    const uint64_t tbw = r->config.run.tbw;
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
        if (c->estimated && p->local_ranks > 1)
            printf(", %.3g from each other", p->gpu->peers * 1e-9);
        for (uint32_t i = 0; i < r->given_count; i++)
            printf("%s %s", i > 0 ? "," : ", given:", spw_resource_name(r->given[i].resource));
        printf("\n");
    }
    printf("  disk wear: %s written a step%s", spw_format_bytes(a, sizeof a, (uint64_t)x->written),
           x->written > (double)x->traffic.nvme_write ? " by the ranks of a host" : "");
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
    if (!x->timed) {
        printf("\n  no settings are compared for --faster: times are not predicted\n");
        return;
    }
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

void
cli_plan_show(const plan_run *r)
{
    const bool fits = r->err.status == SPW_OK;
    spw_plan_print(&r->plan, to_file, stdout);
    if (fits) {
        print_links(&r->plan, r->rated ? &r->rates : NULL, &r->x);
        print_times(r);
        print_checkpoints(&r->config, r->engine);
    }
    print_decisions(&r->plan);
    if (fits && r->wants_faster)
        print_faster(&r->faster, &r->x);
    if (!fits)
        print_suggestion(stdout, &r->config, &r->plan, &r->nearest);
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
        json_array_append_new(paths, json_pack("{s:o, s:o, s:f}", "path", cli_json_text(p->paths[i]), "bytes",
                                               integer(p->path_bytes[i]), "weight", p->path_weight[i]));
    return json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "params", integer(p->params), "bytes", purposes, "total",
        tiers_json(p->device_bytes, p->host_bytes,
                   p->weight_nvme + p->record_nvme + p->grad_nvme + p->activations_nvme + p->spare_nvme),
        "budget", tiers_json(p->device_budget, p->host_budget, SPW_AUTO), "weight_slots", integer(p->weight_slots),
        "record_slots", integer(p->record_slots), "paths", paths, "decisions", decisions, "tokens", integer(p->tokens));
}

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

void
cli_plan_show_json(const plan_run *r)
{
    const spw_plan *p = &r->plan;
    const spw_prediction *x = &r->x;
    const spw_calibration *c = &r->calibration;
    const spw_suggestion *s = &r->nearest;
    const spw_error *err = &r->err;
    json_t *root = plan_json(p), *seconds = json_object(), *sets = json_array();
    const uint64_t saved = cli_checkpoints_at_once(&r->config, NULL);
    char *text;
    json_object_set_new(root, "fits", json_boolean(err->status == SPW_OK));
    json_object_set_new(root, "gpu", p->gpu != NULL ? json_string(p->gpu->name) : json_null());
    if (err->status == SPW_OK) {
        for (int k = 0; k < SPW_RESOURCE_COUNT; k++)
            json_object_set_new(seconds, spw_resource_name((spw_resource)k), number(x->seconds[k]));
        json_object_set_new(root, "step",
                            json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "nvme_read",
                                      integer(x->traffic.nvme_read), "nvme_write", integer(x->traffic.nvme_write),
                                      "h2d", integer(x->traffic.h2d), "d2h", integer(x->traffic.d2h), "gather",
                                      integer(p->gathered.all), "reduce", integer(p->reduced.all), "gather_hosts",
                                      integer(p->gathered.far), "reduce_hosts", integer(p->reduced.far), "trade",
                                      integer(p->traded.all), "trade_hosts", integer(p->traded.far)));
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
                            !r->rated ? json_null()
                                      : json_pack("{s:i, s:i, s:i, s:b, s:f}", "measured", (int)c->measured, "cached",
                                                  (int)c->cached, "unknown", (int)c->unknown, "estimated",
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
        json_object_set_new(root, "smaller_batch_fits_with",
                            s->batch > 0
                                ? json_pack("{s:I, s:O}", "train_batch_size", (json_int_t)s->batch, "set", sets)
                                : json_null());
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
