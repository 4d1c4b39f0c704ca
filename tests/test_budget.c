/*
 * Budgets of the whole program: random configurations run as child processes, each in a cgroup that holds host_memory
 * and device_memory together where one can be made. Each either trains within its plan or exits 3 with the table.
 *
 * What fails it: the kernel's own peak of the process (wait4) or what it counts itself above the plan, which is never above
 * the budgets; a plan that is more than 5 MiB and 5 % too large; a child that is killed, or reads files again that its own
 * files pushed out of memory. The peak counts program and libraries too, which a cgroup often charges to somebody else;
 * RLIMIT_AS and RLIMIT_DATA count what is mapped, and OpenBLAS maps 128 MiB per thread to touch one.
 */
#include "lib_random.h"
#include "lib_tiny.h"
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

enum { LANES = 2, STEPS_MAX = 3, FLOOR_BYTES = 5 << 20, AGAIN_PAGES_MAX = 4096 };

/* One child at a time. */
typedef struct lane {
    char dir[300], cgroup[600];
    pid_t pid;
    uint32_t run;
    uint64_t host, device; /* budgets; 0: auto */
    bool again;            /* with the budget that the refusal named */
    double began;          /* seconds of the monotonic clock */
} lane;

static char base[256], program[512];
static uint64_t seed, trained, refused, in_cgroup, pages_again;
static double slack_least = INFINITY, slack_most;

static double
seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Draw number `what` of configuration run, below n. */
static uint64_t
pick(uint32_t run, uint32_t what, uint64_t n)
{
    uint32_t r[4];
    spw_philox(seed, run, what, r);
    return (((uint64_t)r[0] << 32) | r[1]) % n;
}

/* ---------------------------------------------------------------- cgroups */

static bool
write_text(const char *dir, const char *name, const char *text)
{
    char path[1000];
    FILE *f;
    bool ok;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    f = fopen(path, "we");
    ok = f != NULL && fputs(text, f) >= 0;
    return f != NULL && fclose(f) == 0 && ok;
}

/* A folder below this process's own memory cgroup, version 1 or 2; "" where that is not permitted. Each child has a new
 * one: pages of files that the child before still has to write stay charged, and would kill the next as it starts. */
static void
make_cgroup(lane *l)
{
    static unsigned made;
    char line[400], *name;
    FILE *f = fopen("/proc/self/cgroup", "re");
    l->cgroup[0] = '\0';
    while (f != NULL && l->cgroup[0] == '\0' && fgets(line, sizeof line, f) != NULL) {
        bool v1 = strstr(line, ":memory:") != NULL, v2 = strncmp(line, "0::", 3) == 0;
        const char *mount = v1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup";
        line[strcspn(line, "\n")] = '\0';
        name = strrchr(line, ':');
        if ((!v1 && !v2) || name == NULL)
            continue;
        snprintf(l->cgroup, sizeof l->cgroup, "%s%s/spw-budget-%ld-%u", mount,
                 strcmp(name + 1, "/") == 0 ? "" : name + 1, (long)getpid(), made++);
        if (mkdir(l->cgroup, 0755) != 0 ||
            !write_text(l->cgroup, v1 ? "memory.limit_in_bytes" : "memory.max", v1 ? "-1" : "max")) {
            (void)rmdir(l->cgroup);
            l->cgroup[0] = '\0';
        }
    }
    if (f != NULL)
        fclose(f);
}

static bool
set_limit(const lane *l, uint64_t bytes)
{
    char text[32], probe[700];
    bool v1;
    snprintf(probe, sizeof probe, "%s/memory.limit_in_bytes", l->cgroup);
    v1 = access(probe, F_OK) == 0;
    snprintf(text, sizeof text, "%llu", (unsigned long long)(v1 ? bytes : bytes + bytes / 256 + (2u << 20)));
    return write_text(l->cgroup, v1 ? "memory.limit_in_bytes" : "memory.max",
                      text); /* version 2 counts the kernel too */
}

enum { SAYS_BYTES = 4096, VALUE_BYTES = 900 }; /* the first of memory.stat's are those that matter */

/* What a child that was killed met in its cgroup: names and values. */
static const char *
cgroup_says(const lane *l)
{
    static const char *const names[2][5] = {
        {"memory.max_usage_in_bytes", "memory.limit_in_bytes", "memory.failcnt", "memory.kmem.max_usage_in_bytes",
         "memory.stat"},
        {"memory.peak", "memory.max", "memory.events", "memory.current", "memory.stat"},
    };
    static char says[SAYS_BYTES];
    char probe[700];
    size_t at = (size_t)snprintf(says, sizeof says, "cgroup:");
    bool v1;
    snprintf(probe, sizeof probe, "%s/memory.limit_in_bytes", l->cgroup);
    v1 = access(probe, F_OK) == 0;
    for (int i = 0; i < 5 && l->cgroup[0] != '\0'; i++) {
        char value[VALUE_BYTES] = "";
        FILE *f;
        snprintf(probe, sizeof probe, "%s/%s", l->cgroup, names[v1 ? 0 : 1][i]);
        f = fopen(probe, "re");
        value[f != NULL ? fread(value, 1, sizeof value - 1, f) : 0] = '\0';
        for (char *c = value; *c != '\0'; c++)
            *c = *c == '\n' ? ' ' : *c;
        if (f != NULL)
            fclose(f);
        at += (size_t)snprintf(says + at, sizeof says - at, " %s %s", names[v1 ? 0 : 1][i], value);
    }
    return says;
}

/* ---------------------------------------------------------------- configurations */

static const char *
tier(uint64_t k)
{
    static const char *const names[] = {"none", "cpu", "nvme", "nvme"};
    return names[k];
}

static const char *
full_layers(int count)
{
    static char list[200];
    list[0] = '\0';
    for (int i = 0; i < count; i++)
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s\"full_attention\"", i > 0 ? ", " : "");
    return list;
}

static void
configure(const lane *l)
{
    static const char *const formats[] = {"split", "fp32", "mixed", "split-bf16", "split-int8", "split24-int8"};
    static const char *const codes[] = {"none", "int8", "int4"};
    static const char *const optimizers[] = {"AdamW", "AdamW", "Lion", "SGD"};
    uint32_t r = l->run;
    uint64_t width = 32 * (1 + pick(r, 1, 8)), T = 16 << pick(r, 2, 3), format = pick(r, 3, 6),
             passes = pick(r, 4, 4) == 0;
    bool prefers = pick(r, 51, 4) == 0; /* pairs of answers, of which the start is asked */
    bool llama = pick(r, 5, 3) == 0, experts = llama && pick(r, 36, 2) == 0,
         gemma = llama && !experts && pick(r, 40, 2) == 0, /* with two tables of positions */
        four = gemma && pick(r, 48, 2) == 0,               /* what blocks leave for later ones */
        packed = llama && !experts && !gemma && pick(r, 42, 2) == 0,
         linear = llama && !experts && !gemma && !packed && pick(r, 43, 2) == 0;
    char path[400], host[32], device[32], frozen[200] = "";
    FILE *f;
    snprintf(path, sizeof path, "%s/config.json", l->dir);
    if (pick(r, 34, 4) == 0)
        snprintf(frozen, sizeof frozen, "\"freeze\": [\"%s\", \"%s\"], \"frozen_codes\": \"%s\", ",
                 llama ? "model.embed_tokens.weight" : "w*", llama ? "model.layers.[01].*" : "h.[01].*",
                 codes[pick(r, 35, 3)]);
    sync(); /* what a build has left to write makes a cgroup wait for room, and kills where it cannot */
    f = fopen(path, "we");
    assert_non_null(f);
    snprintf(host, sizeof host, l->host > 0 ? "%llu" : "\"auto\"", (unsigned long long)l->host);
    snprintf(device, sizeof device, l->device > 0 ? "%llu" : "\"auto\"", (unsigned long long)l->device);
    fprintf(f, "{\"model\": {\"model_type\": \"%s\", \"vocab_size\": %d, ",
            experts  ? "mixtral"
            : four   ? "gemma4_text"
            : gemma  ? "gemma3_text"
            : packed ? "phi3"
            : linear ? "qwen3_5_text"
            : llama  ? "llama"
                     : "gpt2",
            256 << (int)pick(r, 6, 4));
    if (experts)
        fprintf(f, "\"num_local_experts\": %d, \"num_experts_per_tok\": %d, ", 3 + (int)pick(r, 37, 6),
                1 + (int)pick(r, 38, 3));
    if (four)
        fprintf(f,
                "\"head_dim\": 8, \"global_head_dim\": %d, \"layer_types\": [%s], \"hidden_size_per_layer_input\": %d, "
                "\"vocab_size_per_layer_input\": %d, \"num_kv_shared_layers\": %d, ",
                16 << (int)pick(r, 49, 6), full_layers(1 + (int)pick(r, 7, 6)), 16 * (int)pick(r, 50, 4),
                256 << (int)pick(r, 6, 4), (int)pick(r, 7, 6) / 2);
    else if (gemma)
        fprintf(f, "\"head_dim\": %d, \"sliding_window\": 7, \"sliding_window_pattern\": 2, ",
                8 << (int)pick(r, 41, 5));
    if (linear)
        fprintf(f,
                "\"head_dim\": 32, \"full_attention_interval\": %d, \"linear_num_key_heads\": 2, "
                "\"linear_num_value_heads\": %d, \"linear_key_head_dim\": %d, \"linear_value_head_dim\": %d, ",
                2 + (int)pick(r, 44, 3), 2 << (int)pick(r, 45, 3), 8 << (int)pick(r, 46, 4), 8 << (int)pick(r, 47, 4));
    if (llama)
        fprintf(f,
                "\"max_position_embeddings\": %d, \"hidden_size\": %d, \"num_hidden_layers\": %d, "
                "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"intermediate_size\": %d},\n",
                (int)T, (int)width, 1 + (int)pick(r, 7, 6), (experts ? 16 : 64) * (1 + (int)pick(r, 8, 12)));
    else
        fprintf(f, "\"n_positions\": %d, \"n_embd\": %d, \"n_layer\": %d, \"n_head\": 4},\n", (int)T, (int)width,
                1 + (int)pick(r, 7, 6));
    fprintf(f, "\"data\": {\"path\": [\"%s/%s\"], \"seq_length\": %d, \"documents\": \"%s\"},\n", base,
            prefers ? "pairs.jsonl" : "text", (int)T,
            prefers               ? "whole"
            : pick(r, 41, 3) == 0 ? "separate"
                                  : "packed");
    fprintf(f,
            "\"train_micro_batch_size_per_gpu\": %d, \"gradient_accumulation_steps\": %d, \"gradient_clipping\": %d,\n",
            1 + (int)pick(r, 9, 4), 1 + (int)pick(r, 10, 4), (int)pick(r, 11, 2));
    fprintf(f, "\"bf16\": {\"enabled\": %s}, \"optimizer\": {\"type\": \"%s\", \"params\": {\"lr\": 1e-3}},\n",
            format == 1 ? "false" : "true", optimizers[pick(r, 12, 4)]);
    fprintf(
        f,
        "\"zero_optimization\": {\"stage\": 3, \"offload_param\": {\"device\": \"%s\", \"nvme_path\": \"%s/swap\"}, "
        "\"offload_optimizer\": {\"device\": \"%s\", \"nvme_path\": \"%s/swap\"}},\n",
        tier(pick(r, 13, 4)), l->dir, tier(pick(r, 14, 4)), l->dir);
    fprintf(f, "\"aio\": {\"backend\": \"%s\", \"block_size\": %d, \"queue_depth\": %d},\n",
            pick(r, 15, 4) == 0 ? "threads" : "auto", 65536 << (int)pick(r, 16, 6), 1 << (int)pick(r, 17, 7));
    fprintf(
        f,
        "\"spillway\": {\"steps\": %d, \"device\": \"cpu\", \"device_memory\": %s, \"host_memory\": %s, "
        "\"state_format\": \"%s\", \"chunk_elems\": %d, \"weight_slots\": %d, \"record_slots\": %d, "
        "\"grad_dtype\": \"%s\", \"micro_batches_per_pass\": %d, \"optimizer_threads\": %d, \"compute_threads\": %d, "
        "\"gradients\": \"%s\", %s\"preference\": {\"loss\": \"%s\"}, "
        "\"checkpoint_dir\": \"%s\", \"checkpoint_interval\": 2, \"eval_interval\": %d, "
        "\"eval_batches\": %d, "
        "\"run_log\": \"%s/log\"}}\n",
        2 + (int)pick(r, 18, STEPS_MAX - 1), device, host, formats[format], 4096 << (int)(2 * pick(r, 19, 5)),
        pick(r, 20, 2) ? (int)pick(r, 21, 9) : 0, pick(r, 22, 2) ? (int)pick(r, 23, 9) : 0,
        pick(r, 24, 2) && !passes ? "bf16" : "fp32", (int)passes, (int)pick(r, 25, 5), (int)pick(r, 26, 4),
        pick(r, 14, 4) >= 2 && !passes && pick(r, 39, 2) ? "nvme" : "auto", frozen,
        prefers ? spw_preference_name((spw_preference_kind)pick(r, 52, SPW_PREFERENCE_COUNT)) : "none",
        pick(r, 27, 2) ? l->dir : "", (int)pick(r, 28, 3), 1 + (int)pick(r, 29, 8), l->dir);
    assert_int_equal(fclose(f), 0);
}

/* ---------------------------------------------------------------- children */

static void
start(lane *l)
{
    char config[400], out[400];
    bool caged;
    l->began = seconds();
    snprintf(config, sizeof config, "%s/config.json", l->dir);
    snprintf(out, sizeof out, "%s/out", l->dir);
    configure(l);
    make_cgroup(l);
    caged = l->cgroup[0] != '\0' && set_limit(l, l->host > 0 && l->device > 0 ? l->host + l->device : 4ull << 30);
    in_cgroup += caged && l->host > 0 && l->device > 0;
    l->pid = fork();
    assert_true(l->pid >= 0);
    if (l->pid == 0) {
        int fd = open(out, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0 || (caged && !write_text(l->cgroup, "cgroup.procs", "0")))
            _exit(99);
        alarm(120); /* one that hangs is killed, and that fails */
        execl(program, program, "train", config, "--quiet", (char *)NULL);
        _exit(98);
    }
}

static char text[1 << 20], config_text[1 << 14];

/* The start of one of the child's files. */
static char *
output(const lane *l, const char *name, char *buf, size_t buf_bytes)
{
    char path[400];
    size_t got;
    FILE *f;
    snprintf(path, sizeof path, "%s/%s", l->dir, name);
    f = fopen(path, "re");
    got = f != NULL ? fread(buf, 1, buf_bytes - 1, f) : 0;
    buf[got] = '\0';
    if (f != NULL)
        fclose(f);
    return buf;
}

static uint64_t
bytes_of(json_t *object, const char *name)
{
    json_t *value = json_object_get(object, name);
    assert_true(json_is_integer(value));
    return (uint64_t)json_integer_value(value);
}

/* Bytes of the plan and those that the run counted, from the last object of its log. */
static void
planned(const lane *l, uint64_t *host, uint64_t *device, uint64_t *counted)
{
    char *line;
    json_t *root, *plan, *peak;
    size_t end = strlen(output(l, "log", text, sizeof text));
    assert_true(end > 1);
    text[end - 1] = '\0';
    line = strrchr(text, '\n') != NULL ? strrchr(text, '\n') + 1 : text;
    root = json_loads(line, 0, NULL);
    assert_non_null(root);
    plan = json_object_get(root, "plan_bytes");
    *host = bytes_of(plan, "host");
    *device = bytes_of(plan, "device");
    peak = json_object_get(root, "peak_bytes");
    *counted = bytes_of(peak, "host") + bytes_of(peak, "device");
    json_decref(root);
}

static void
fail_run(const lane *l, const char *what)
{
    output(l, "out", text, sizeof text);
    output(l, "config.json", config_text, sizeof config_text);
    fprintf(stderr, "%s\n%s\n", text, config_text); /* cmocka would cut them */
    fail_msg("SPW_SEED=%llu, configuration %u: %s", (unsigned long long)seed, l->run, what);
}

static void
check_trained(const lane *l, uint64_t peak)
{
    uint64_t host, device, counted, plan;
    char what[200];
    planned(l, &host, &device, &counted);
    plan = host + device;
    snprintf(what, sizeof what, "peak %.2f MiB, counted %.3f, planned %.3f: %.2f host, %.2f device; budgets %.2f, %.2f",
             (double)peak / (1 << 20), (double)counted / (1 << 20), (double)plan / (1 << 20), (double)host / (1 << 20),
             (double)device / (1 << 20), (double)l->host / (1 << 20), (double)l->device / (1 << 20));
    if ((l->host > 0 && host > l->host) || (l->device > 0 && device > l->device) || peak > plan || counted > plan)
        fail_run(l, what);
    if (plan - peak > plan / 20 && plan - peak > FLOOR_BYTES)
        fail_run(l, what);
    slack_least = fmin(slack_least, (double)(plan - peak) / (1 << 20));
    slack_most = fmax(slack_most, (double)(plan - peak) / (1 << 20));
    trained++;
}

/* What goes through the page cache pushes program and files out of a cgroup that is nearly full, and they come again. */
static void
check_pages(const lane *l)
{
    char path[700], line[200], what[200];
    unsigned long long pages = 0;
    FILE *f;
    snprintf(path, sizeof path, "%s/memory.stat", l->cgroup);
    f = l->cgroup[0] != '\0' ? fopen(path, "re") : NULL;
    while (f != NULL && fgets(line, sizeof line, f) != NULL &&
           sscanf(line, "workingset_refault_file %llu", &pages) != 1)
        ;
    if (f != NULL)
        fclose(f);
    pages_again = pages > pages_again ? pages : pages_again;
    snprintf(what, sizeof what, "%llu pages of files were read again after they had left the page cache", pages);
    if (pages > AGAIN_PAGES_MAX)
        fail_run(l, what);
}

/* The table is there; a budget that was named goes into the lane for another try. */
static bool
check_refused(lane *l)
{
    char *at;
    unsigned long long least = 0;
    bool device = strstr(output(l, "out", text, sizeof text), "spillway.device_memory is") != NULL;
    if (strstr(text, "  total ") == NULL)
        fail_run(l, "exit 3 without the table");
    at = strstr(text, "needs at least");
    at = at == NULL ? strstr(text, "need at least") : at;
    at = at == NULL ? NULL : strchr(at, '(');
    if (at == NULL || sscanf(at, "(%llu bytes)", &least) != 1)
        fail_run(l, "exit 3 without the bytes that are needed");
    refused++;
    if (l->again && !device)
        return false; /* the process differs by a page or so from start to start; once more would be a loop */
    *(device ? &l->device : &l->host) = least;
    l->again = !device;
    return true;
}

static void
clean(const lane *l)
{
    char command[900];
    snprintf(command, sizeof command, "rm -rf '%s' && mkdir -p '%s/swap'", l->dir, l->dir);
    assert_int_equal(system(command), 0);
}

/* 80 random configurations (SPW_RUNS says otherwise), two at a time; what is refused is tried again with the budget that the refusal names. */
static void
test_random_budgets(void **state)
{
    lane lanes[LANES];
    const char *first = getenv("SPW_FIRST"); /* a configuration that failed, without those before it */
    uint32_t next = first != NULL ? (uint32_t)strtoul(first, NULL, 10) : 0, running = 0;
    const uint32_t runs = next + (uint32_t)random_runs(80);
    char path[300];
    FILE *f;
    (void)state;
    if (SANITIZED)
        skip(); /* they multiply memory */
    snprintf(path, sizeof path, "%s/text", base);
    f = fopen(path, "we");
    assert_non_null(f);
    for (int i = 0; i < 20000; i++)
        fprintf(f, "line %d says that %d is not %d\n", i, i * 7, i % 13);
    assert_int_equal(fclose(f), 0);
    snprintf(path, sizeof path, "%s/pairs.jsonl", base);
    f = fopen(path, "we");
    assert_non_null(f);
    for (int i = 0; i < 6000; i++)
        fprintf(f, "{\"prompt\": \"%d\", \"chosen\": \"%c\", \"rejected\": \"%c\"}\n", i % 90, 'a' + i % 20,
                'A' + i % 20);
    assert_int_equal(fclose(f), 0);
    for (uint32_t i = 0; i < LANES; i++) {
        lanes[i] = (lane){.pid = 0};
        snprintf(lanes[i].dir, sizeof lanes[i].dir, "%s/%u", base, i);
    }
    for (;;) {
        struct rusage usage;
        lane *l = NULL;
        int status;
        pid_t pid;
        for (uint32_t i = 0; i < LANES && next < runs; i++) {
            if (lanes[i].pid != 0)
                continue;
            lanes[i].run = next;
            lanes[i].again = false;
            lanes[i].host = pick(next, 30, 4) == 0 ? 0 : (8ull << 20) + pick(next, 31, 48ull << 20);
            lanes[i].device = pick(next, 32, 3) == 0 ? 0 : (1ull << 20) + pick(next, 33, 32ull << 20);
            clean(&lanes[i]);
            start(&lanes[i]);
            next++;
            running++;
        }
        if (running == 0)
            break;
        pid = wait4(-1, &status, 0, &usage);
        assert_true(pid > 0);
        for (uint32_t i = 0; i < LANES; i++)
            l = lanes[i].pid == pid ? &lanes[i] : l;
        assert_non_null(l);
        running--;
        l->pid = 0;
        if (!WIFEXITED(status)) {
            char what[SAYS_BYTES + 200];
            snprintf(what, sizeof what, "ended by signal %d after %.1f s, peak %.2f MiB, %s", WTERMSIG(status),
                     seconds() - l->began, (double)usage.ru_maxrss / 1024, cgroup_says(l));
            fail_run(l, what);
        }
        check_pages(l);
        (void)rmdir(l->cgroup);
        if (WEXITSTATUS(status) == 0)
            check_trained(l, (uint64_t)usage.ru_maxrss * 1024);
        else if (WEXITSTATUS(status) != 3)
            fail_run(l, "neither 0 nor 3");
        else if (check_refused(l)) {
            clean(l);
            start(l);
            running++;
        }
    }
    print_message(
        "seed %llu: %llu trained, %llu refusals, %llu in a cgroup of their budgets' size; plan minus peak %.2f to "
        "%.2f MiB; %llu pages at most were read again\n",
        (unsigned long long)seed, (unsigned long long)trained, (unsigned long long)refused,
        (unsigned long long)in_cgroup, slack_least, slack_most, (unsigned long long)pages_again);
    assert_true(first != NULL || (trained > runs / 2 && refused > runs / 10));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_budgets)};
    const char *wish = getenv("SPW_SEED"), *build = getenv("SPW_BUILD"), *tmp = getenv("TMPDIR");
    char command[300];
    int failed;
    seed = wish != NULL ? strtoull(wish, NULL, 10) : 1;
    snprintf(program, sizeof program, "%s/spillway", build != NULL ? build : "build/release");
    snprintf(base, sizeof base, "%s/spw-budget-XXXXXX", tmp != NULL ? tmp : "/tmp");
    if (mkdtemp(base) == NULL)
        return 1;
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(command, sizeof command, "rm -rf '%s'", base);
    return system(command) == 0 ? failed : 1;
}
