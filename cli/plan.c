/*
 * spillway plan: says before a run where every byte will live, what a step moves over each link, how long it takes and
 * why, from the same plan that train makes; and the table of memory per device of the ZeRO paper. It takes nothing and
 * leaves nothing behind but caches: measured rates, and tokens of text that train would make and will find.
 */
#include "plan.h"
#include "train.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { OVERRIDES_MAX = 256, LIST_MAX = 16, GIVEN_MAX = 32 };

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

/* ---------------------------------------------------------------- the command */

static void
load_data(plan_run *r)
{
    const spw_config *c = &r->config;
    const uint64_t elems = cli_train_batch_max(c) * c->micro_batch * c->data.seq_length;
    spw_error err = {0};
    if (spw_config_open_data(&r->data, c, &err) != SPW_OK)
        fprintf(stderr, "spillway: warning: planned without the data: %s\n", err.message);
    r->tokens = spw_mem_calloc(elems, sizeof *r->tokens);
    r->targets = spw_mem_calloc(elems, sizeof *r->targets);
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

void
cli_warn_of_schedule(const spw_config *c)
{
    const uint64_t end = c->scheduler.total_num_steps;
    const bool ends =
        strcmp(c->scheduler.type, "WarmupCosineLR") == 0 || strcmp(c->scheduler.type, "WarmupDecayLR") == 0;
    if (ends && end < c->run.steps)
        fprintf(
            stderr,
            "spillway: warning: scheduler.params.total_num_steps %llu is less than spillway.steps %llu: the learning "
            "rate is %.3g from then on\n",
            (unsigned long long)end, (unsigned long long)c->run.steps, spw_schedule_lr(c, end + 1));
}

void
cli_warn_of_idle_keys(const spw_config *c, uint64_t ranks)
{
    static const char *const frozen = "no weight is frozen (spillway.lora and spillway.freeze do it)";
    const bool trained = c->run.lora.rank == 0 && c->run.freeze.count == 0;
    const bool pairs = spw_config_preference(c, &(spw_preference){0});
    const struct {
        const char *key;
        bool set, idle;
        const char *why;
    } keys[] = {
        {"spillway.frozen_codes", strcmp(c->run.frozen_codes, "none") != 0, trained, frozen},
        {"zero_optimization.zero_quantized_nontrainable_weights", c->zero.quantized_frozen, trained, frozen},
        {"zero_optimization.zero_hpz_partition_size", c->zero.hpz_partition_size > 1, ranks == 1, "there is one rank"},
        {"sequence_parallel_size", c->sequence_ranks > 1, ranks == 1, "there is one rank"},
        {"zero_optimization.mics_shard_size", c->zero.mics_shard_size > 1, ranks == 1, "there is one rank"},
        {"spillway.nearest_moments", c->run.nearest_moments, c->run.state_format != SPW_STATE_SPLIT_BF16,
         "spillway.state_format is not split-bf16"},
        {"spillway.router_balance", c->run.router_balance > 0, c->model.experts == 0, "the model has no experts"},
        {"spillway.reference_steps", c->run.reference_steps > 0, !cli_train_has_reference(c),
         "spillway.preference has no reference"},
        {"data.messages_field", c->data.messages_field[0] != '\0', c->data.chat[0] == '\0', "data.chat is not set"},
        {"data.chosen_field", strcmp(c->data.chosen_field, "chosen") != 0, !pairs,
         "spillway.preference.loss is not set"},
        {"data.rejected_field", strcmp(c->data.rejected_field, "rejected") != 0, !pairs,
         "spillway.preference.loss is not set"},
        {"spillway.checkpoint_interval", c->run.checkpoint_interval > 0, c->run.checkpoint_dir[0] == '\0',
         "spillway.checkpoint_dir is not set"},
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        if (keys[i].set && keys[i].idle)
            fprintf(stderr, "spillway: warning: %s changes nothing: %s\n", keys[i].key, keys[i].why);
    }
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

/* A forward pass moves half of a step's weights and no records, and computes a third of it at most. */
static void
add_reference(spw_plan *p, const spw_config *c, const spw_data *data, const spw_prediction *x)
{
    spw_decision *d = &p->decisions[p->decision_count];
    const uint64_t sequences = data != NULL && cli_train_has_reference(c) ? cli_train_reference_sequences(c, data) : 0;
    size_t n;
    if (sequences == 0 || p->decision_count == SPW_DECISIONS_MAX)
        return;
    p->decision_count++;
    snprintf(d->name, sizeof d->name, "reference");
    snprintf(d->value, sizeof d->value, "%llu sequences", (unsigned long long)sequences);
    n = (size_t)snprintf(d->reason, sizeof d->reason, "the start is asked about them before the first step");
    if (x->timed)
        snprintf(d->reason + n, sizeof d->reason - n, ", which takes at most half of so many steps' time: %.3g s",
                 (double)sequences / (double)c->train_batch_size * x->step_s / 2);
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

/* Weights that are here are looked at as train will, but for their numbers; a folder with its config.json alone is planned without a word. */
static void
warn_of_weights(const spw_config *c, const spw_model *model)
{
    const char *folder = spw_config_start_folder(c);
    spw_hf_reader *r = NULL;
    spw_error err = {0};
    if (folder == NULL || !spw_hf_has_weights(folder))
        return;
    if (spw_hf_reader_open(&r, folder, &err) != SPW_OK || spw_hf_reader_bind(r, model, &err) != SPW_OK)
        fprintf(stderr, "spillway: warning: train will not start here: %s\n", err.message);
    spw_hf_reader_close(r);
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

static void
warn_of_idle_rates(const job *j, const spw_plan *p)
{
    for (uint32_t i = 0; i < j->given_count; i++) {
        const spw_resource k = j->given[i].resource;
        const char *why = k == SPW_RESOURCE_NETWORK && p->ranks == p->local_ranks ? "there is one host (--hosts N)"
                          : k == SPW_RESOURCE_RANKS && p->local_ranks < 2         ? "there is one rank on a host"
                                                                                  : NULL;
        if (why != NULL)
            fprintf(stderr, "spillway: warning: --rate %s changes nothing: %s\n", spw_resource_name(k), why);
    }
}

/* In the place of all that a resource takes; of nvme both ways too. */
static void
give_rate(spw_rates *r, const given_rate *given)
{
    const double v = given->value;
    const int way = given->resource == SPW_RESOURCE_NETWORK ? SPW_WAY_FAR : SPW_WAY_NEAR;
    switch (given->resource) {
    case SPW_RESOURCE_COMPUTE:
        r->flops = r->orthogonal = v;
        r->attention = 0; /* it has none of its own then */
        break;
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

/* Measured, and given. From now on training chooses by what was measured, and may choose otherwise: so is the plan made again. */
static spw_status
find_rates(const job *j, plan_run *r, spw_engine_options *options)
{
    spw_calibrate(&r->rates, &r->config, &r->plan, j->calibrate ? SPW_CALIBRATE_FORCE : SPW_CALIBRATE_AUTO,
                  &r->calibration);
    for (uint32_t i = 0; i < j->given_count; i++)
        give_rate(&r->rates, &j->given[i]);
    if ((r->calibration.measured == 0 && j->given_count == 0) || !r->plan.device_apart || r->plan.ranks > 1)
        return SPW_OK;
    spw_engine_destroy(r->engine);
    options->rates = j->given_count > 0 ? &r->rates : NULL;
    return spw_engine_create(&r->engine, options, &r->err);
}

static int
plan_config(const job *j)
{
    static plan_run r;
    spw_engine_options options = {
        .config = &r.config, .plan_only = true, .kept_rates = true, .gpu = j->gpu, .plan_out = &r.plan};
    uint32_t local_ranks = 0;
    spw_status st;
    int rc;
    if (spw_config_load(&r.config, j->path, j->overrides, j->override_count, &r.err) != SPW_OK ||
        ranks_of_hosts(j, &r.config, &local_ranks, &r.err) != SPW_OK) {
        cli_fail(&r.err);
        return EXIT_USAGE;
    }
    r.rated = !j->no_measure;
    r.wants_faster = j->faster;
    r.given = j->given;
    r.given_count = j->given_count;
    load_data(&r);
    st = spw_model_from_config(&r.model, &r.config, &r.err);
    options.model = r.model;
    options.local_ranks = local_ranks;
    options.process_bytes = process_of_train();
    options.targeted = r.data != NULL ? spw_data_targeted(r.data) : 0;
    options.caller_bytes = cli_train_reference_bytes(&r.config, r.data);
    options.room_bytes = cli_plan_room(j->gpu, &r.config);
    options.weights_from = spw_config_start_folder(&r.config);
    if (st == SPW_OK)
        st = spw_engine_create(&r.engine, &options, &r.err);
    if (st == SPW_OK && r.rated)
        st = find_rates(j, &r, &options);
    if (st == SPW_OK) {
        spw_plan_predict(&r.plan, r.rated ? &r.rates : NULL, r.config.run.tbw, &r.x);
        if (j->faster)
            st = spw_plan_faster(&options, &r.plan, &r.rates, &r.faster, &r.err);
    }
    if (r.data != NULL)
        add_chat(&r.plan, spw_data_chat(r.data));
    add_rope(&r.plan, &r.config);
    add_reference(&r.plan, &r.config, r.data, &r.x);
    add_gpu(&r.plan);
    if (st == SPW_OK) {
        warn_of_folders(&r.config, r.engine, &r.plan);
        warn_of_weights(&r.config, r.model);
        cli_warn_of_length(&r.config);
        cli_warn_of_schedule(&r.config);
        cli_warn_of_idle_keys(&r.config, r.plan.ranks);
        warn_of_idle_rates(j, &r.plan);
    }
    if (st == SPW_ENOFIT)
        (void)cli_plan_suggest(&r.config, r.model, &r.plan, &r.nearest);
    if (st == SPW_OK || st == SPW_ENOFIT)
        (j->json ? cli_plan_show_json : cli_plan_show)(&r);
    spw_engine_destroy(r.engine);
    spw_model_destroy(r.model);
    spw_data_close(r.data);
    spw_mem_free(r.tokens);
    spw_mem_free(r.targets);
    if (st == SPW_OK)
        return EXIT_DONE;
    rc = cli_fail(&r.err);
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
        if (strcasecmp(all[i].name, name) == 0) {
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
            return cli_unknown_option("plan", name);
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
