/*
 * Links between devices: parts gathered in place, parts swapped and added up in the order of the ranks, bit for bit what the host
 * adds up, and a link that is given up when its caller says so. Each rank is a process with a device of its own. Without
 * arguments on the emulated device with the emulated NCCL, one to three ranks; --gpu: on GPUs with NCCL, one rank, and as many
 * as there are GPUs (to 4). Speaks TAP.
 */
#include "lib_tiny.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS_MAX = 4, BLOCK = 4096, PART = 3 * BLOCK, SKIP = 77 };

/* What the processes share. */
typedef struct shared {
    unsigned char id[SPW_GPU_LINK_ID_BYTES];
    uint32_t made, devices;
    char about[200];
} shared;

typedef struct rank {
    spw_gpu *gpu;
    spw_gpu_queue *queue, *back;
    spw_gpu_link *link;
    uint32_t idx, world;
    uint64_t deadline_ns; /* of waiting for others */
} rank;

static spw_status
going(void *ctx, spw_error *err)
{
    const rank *r = ctx;
    return spw_now_ns() < r->deadline_ns ? SPW_OK : SPW_RAISE(err, SPW_ETIMEDOUT, "the test has waited long enough");
}

/* Element i of what rank r has for rank to. */
static float
element(uint32_t r, uint32_t to, uint64_t i)
{
    uint32_t bits[4];
    spw_philox(11 + r, to, i, bits);
    return (spw_uniform_f32(bits[0]) - 0.5f) * (float)(1 << bits[1] % 12);
}

static void
fill(float *out, uint32_t r, uint32_t world)
{
    for (uint64_t i = 0; i < (uint64_t)world * PART; i++)
        out[i] = element(r, (uint32_t)(i / PART), i % PART);
}

/* Every rank's first part comes to all of them. */
static spw_status
check_gather(rank *r, float *device, float *host, spw_error *err)
{
    fill(host, r->idx, r->world);
    spw_gpu_write_bytes(r->queue, device + r->idx * PART, host, PART * sizeof *host);
    SPW_TRY(spw_gpu_link_all_gather(r->link, r->queue, device, PART * sizeof *device, err));
    SPW_TRY(spw_gpu_link_wait(r->link, r->queue, err));
    spw_gpu_read_bytes(r->back, host, device, r->world * PART * sizeof *host);
    for (uint64_t i = 0; i < (uint64_t)r->world * PART; i++) {
        if (host[i] != element((uint32_t)(i / PART), 0, i % PART))
            return SPW_RAISE(err, SPW_ECORRUPT, "gathered element %llu is %.9g", (unsigned long long)i, host[i]);
    }
    return SPW_OK;
}

/* The sum of what all ranks have for this one, in two pieces, as the host adds it up. */
static spw_status
check_sum(rank *r, spw_dtype type, bool add, float *device, char *scratch, float *host, spw_error *err)
{
    uint64_t bytes = spw_dtype_bytes(type), piece = 2 * BLOCK;
    char *rounded = scratch, *received = rounded + r->world * PART * bytes;
    float *before = (float *)(void *)(received + r->world * piece * bytes);
    fill(host, r->idx, r->world);
    spw_gpu_write_bytes(r->queue, device, host, r->world * PART * sizeof *host);
    spw_gpu_copy_d2d(r->queue, rounded, type, device, SPW_F32, r->world * PART, NULL);
    for (uint64_t i = 0; i < PART; i++)
        host[i] = element(77, r->idx, i);
    spw_gpu_write_bytes(r->queue, before, host, PART * sizeof *host);
    for (uint64_t first = 0; first < PART; first += piece) {
        uint64_t n = PART - first < piece ? PART - first : piece;
        SPW_TRY(spw_gpu_link_swap(r->link, r->queue, rounded + first * bytes, PART * bytes, received, n * bytes,
                                  n * bytes, err));
        spw_gpu_link_sum(r->link, r->queue, device + first, type, rounded + (r->idx * PART + first) * bytes, received,
                         n, add ? before + first : NULL, n);
    }
    SPW_TRY(spw_gpu_link_wait(r->link, r->queue, err));
    spw_gpu_read_bytes(r->back, host, device, PART * sizeof *host);
    for (uint64_t i = 0; i < PART; i++) {
        float sum = 0, one;
        uint16_t narrow;
        for (uint32_t k = 0; k < r->world; k++) {
            one = element(k, r->idx, i);
            if (type != SPW_F32) {
                spw_convert(&narrow, type, &one, SPW_F32, 1);
                spw_convert(&one, SPW_F32, &narrow, type, 1);
            }
            sum = k == 0 ? one : sum + one;
        }
        sum = add ? element(77, r->idx, i) + sum : sum;
        if (memcmp(&sum, &host[i], sizeof sum) != 0)
            return SPW_RAISE(err, SPW_ECORRUPT, "sum of %s, element %llu: %.9g, the host has %.9g",
                             spw_dtype_name(type), (unsigned long long)i, host[i], sum);
    }
    return SPW_OK;
}

/* The last rank does not come: the others stop waiting when they are told to, and the link is of no use any more. */
static spw_status
check_given_up(rank *r, float *device, spw_error *err)
{
    spw_error why = {0};
    spw_status st;
    if (r->world == 1 || r->idx == r->world - 1)
        return SPW_OK;
    r->deadline_ns = spw_now_ns() + 300000000;
    st = spw_gpu_link_all_gather(r->link, r->queue, device, PART * sizeof *device, &why);
    if (st == SPW_OK)
        st = spw_gpu_link_wait(r->link, r->queue, &why);
    if (st != SPW_ETIMEDOUT)
        return SPW_RAISE(err, SPW_ECORRUPT, "waiting for a rank that does not come: status %d, %s", (int)st,
                         why.message);
    st = spw_gpu_link_all_gather(r->link, r->queue, device, PART * sizeof *device, &why);
    return st == SPW_EPOISONED ? SPW_OK : SPW_RAISE(err, SPW_ECORRUPT, "a link that was given up: status %d", (int)st);
}

static spw_status
run_rank(rank *r, shared *s, spw_error *err)
{
    char name[16];
    float *device = NULL, *host = calloc(RANKS_MAX * PART, sizeof *host);
    char *scratch = NULL;
    snprintf(name, sizeof name, "cuda:%u", r->idx);
    if (spw_gpu_open(&r->gpu, &(spw_gpu_options){.name = name}, err) != SPW_OK ||
        spw_gpu_link_probe(r->gpu, err) != SPW_OK)
        return SPW_EUNSUPPORTED;
    s->devices = spw_gpu_get_info(r->gpu)->device_count;
    snprintf(s->about, sizeof s->about, "%s", spw_gpu_get_info(r->gpu)->description);
    if (r->idx == 0) {
        SPW_TRY(spw_gpu_link_id(r->gpu, s->id, err));
        __atomic_store_n(&s->made, 1, __ATOMIC_RELEASE);
    }
    while (__atomic_load_n(&s->made, __ATOMIC_ACQUIRE) == 0)
        spw_sleep_ns(1000000);
    r->deadline_ns = spw_now_ns() + 60000000000;
    SPW_TRY(spw_gpu_link_create(&r->link, r->gpu, s->id, r->idx, r->world, going, r, err));
    SPW_TRY(spw_gpu_queue_create(&r->queue, r->gpu, SPW_QUEUE_D2H, err));
    SPW_TRY(spw_gpu_queue_create(&r->back, r->gpu, SPW_QUEUE_D2H, err));
    SPW_TRY(spw_gpu_alloc(r->gpu, (void **)&device, RANKS_MAX * PART * sizeof *device, err));
    SPW_TRY(spw_gpu_alloc(r->gpu, (void **)&scratch, 3 * RANKS_MAX * PART * sizeof *device, err));
    for (int t = 0; t < 2 * SPW_DTYPE_COUNT; t++)
        SPW_TRY(check_sum(r, (spw_dtype)(t / 2), t % 2 > 0, device, scratch, host, err));
    SPW_TRY(check_gather(r, device, host, err));
    SPW_TRY(spw_gpu_check(r->gpu, err));
    SPW_TRY(check_given_up(r, device, err));
    spw_gpu_link_destroy(r->link, r->world == 1);
    spw_gpu_queue_destroy(r->queue);
    spw_gpu_queue_destroy(r->back);
    spw_gpu_free(r->gpu, device);
    spw_gpu_free(r->gpu, scratch);
    spw_gpu_close(r->gpu);
    free(host);
    return SPW_OK;
}

/* 0, 1 or SKIP; the parent never starts the device, so that every rank starts it by itself. */
static int
run_world(shared *s, uint32_t world)
{
    pid_t pids[RANKS_MAX];
    int worst = 0, status;
    s->made = 0;
    for (uint32_t i = 0; i < world; i++) {
        fflush(NULL);
        pids[i] = fork();
        if (pids[i] == 0) {
            rank r = {.idx = i, .world = world};
            spw_error err = {0};
            spw_status st;
            alarm(120);
            st = run_rank(&r, s, &err);
            if (st != SPW_OK)
                printf("# rank %u of %u: %s\n", i, world, err.message);
            fflush(NULL);
            _exit(st == SPW_OK ? 0 : st == SPW_EUNSUPPORTED ? SKIP : 1);
        }
    }
    for (uint32_t i = 0; i < world; i++) {
        (void)waitpid(pids[i], &status, 0);
        status = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
        worst = status == 1 || worst == 1 ? 1 : status > worst ? status : worst;
    }
    return worst;
}

int
main(int argc, char **argv)
{
    bool gpu = argc > 1 && strcmp(argv[1], "--gpu") == 0;
    shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint32_t most = 1, done = 0, failed = 0;
    if (s == MAP_FAILED || (!gpu && !tiny_emulated_links("3"))) {
        printf("1..1\nok 1 - links # SKIP no C++ compiler when this was built\n");
        return SKIP;
    }
    for (int late = 0; late < (gpu ? 1 : 2); late++) {
        setenv("SPW_EMULATE_STREAMS", late ? "late" : "", 1);
        for (uint32_t world = 1; world <= most; world++) {
            int rc = run_world(s, world);
            if (rc == SKIP && done == 0) {
                printf("1..1\nok 1 - links # SKIP no GPU, or no NCCL\n");
                return SKIP;
            }
            most = s->devices < RANKS_MAX ? s->devices : RANKS_MAX;
            failed += rc != 0;
            printf("%s %u - %u rank%s of %u device%s, %s%s\n", rc == 0 ? "ok" : "not ok", ++done, world,
                   world > 1 ? "s" : "", s->devices, s->devices > 1 ? "s" : "", s->about, late ? ", late streams" : "");
        }
    }
    printf("1..%u\n", done);
    return failed > 0;
}
