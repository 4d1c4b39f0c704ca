/*
 * test_comm.c - what spw_comm.h promises, with real processes: every collective against a serial reference that is made
 * from the seeds of the ranks alone, on one host and on several (SPW_HOST splits this machine), with random delays and
 * buffers that are overwritten as soon as a call returns. Each test forks its ranks, which join over sockets. Started by
 * an MPI launcher the program is one rank, runs the same checks over MPI and says "ok" on rank 0.
 */
#include "comm/comm_tcp.h"
#include "lib_comm_worlds.h"
#include "lib_tiny.h"
#include "lib_ranks.h"
#include "spw_gpu.h"

#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

static const char *const mixes[] = {"a",    "aa",   "ab",   "aab",  "abc",      "aaaa",
                                    "aabb", "abab", "aaab", "abcd", "aaaaaaaa", "aabbaccb"};
enum { MIX_COUNT = sizeof mixes / sizeof *mixes };

/* ---------------------------------------------------------------- operands and references */

static float
value(uint64_t seed, uint32_t rank, uint64_t i)
{
    uint32_t r[4];
    spw_philox(seed, rank, i / 4, r);
    return (spw_uniform_f32(r[i % 4]) - 0.5f) *
           (float)(1 << (r[i % 4] & 7)); /* magnitudes differ: order shows in the bits */
}

/* What rank has at element i, after rounding to dtype. */
static void
fill(void *out, spw_dtype dtype, uint64_t seed, uint32_t rank, uint64_t first, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float v = value(seed, rank, first + i);
        spw_convert((char *)out + i * spw_dtype_bytes(dtype), dtype, &v, SPW_F32, 1);
    }
}

static float
summand(spw_dtype dtype, uint64_t seed, uint32_t rank, uint64_t i)
{
    float v;
    uint16_t half;
    if (dtype == SPW_F32)
        return value(seed, rank, i);
    fill(&half, dtype, seed, rank, i, 1);
    spw_convert(&v, SPW_F32, &half, dtype, 1);
    return v;
}

static float
serial_sum(spw_dtype dtype, uint64_t seed, const uint32_t *ranks, uint32_t size, uint64_t i)
{
    volatile float sum = summand(dtype, seed, ranks[0], i);
    for (uint32_t m = 1; m < size; m++)
        sum = sum + summand(dtype, seed, ranks[m], i);
    return sum;
}

/* The order that gpu/spw_gpu.h leaves to the cpu device: element i to lane i mod 16, lanes in turn. */
static double
serial_sumsq(const float *x, uint64_t n)
{
    double lane[16] = {0}, sum = 0;
    for (uint64_t i = 0; i < n; i++)
        lane[i % 16] += (double)x[i] * (double)x[i];
    for (int j = 0; j < 16; j++)
        sum += lane[j];
    return sum;
}

typedef struct bench { /* one rank with a channel and room for operands */
    spw_comm *comm;
    spw_channel *ch;
    uint32_t size, rank;
    uint32_t ranks[RANKS_MAX];
    char *a, *b; /* of spw_comm_alloc; of this process alone */
    uint64_t bytes;
    uint64_t seed;
} bench;

static void
poison(bench *t, void *p, uint64_t bytes)
{
    (void)t;
    memset(p, 0xee, bytes);
}

/* every: so many parts further on lies the next; what is between stays. */
static void
check_gather_apart(bench *t, uint64_t part, uint32_t every)
{
    uint64_t seed = ++t->seed, stride = every * part;
    unsigned char *own = (unsigned char *)t->a + t->rank * stride;
    poison(t, t->a, (t->size - 1) * stride + part);
    for (uint64_t i = 0; i < part; i++)
        own[i] = (unsigned char)(i * 7 + seed * 13 + t->ranks[t->rank] * 29 + i / 251);
    OK(every == 1 ? spw_all_gather(t->ch, (uint32_t)seed, t->a, part, err)
                  : spw_all_gather_apart(t->ch, (uint32_t)seed, t->a, part, every, err));
    for (uint32_t m = 0; m < t->size; m++)
        for (uint64_t i = 0; i < (m + 1 < t->size ? stride : part); i++)
            CHECK((unsigned char)t->a[m * stride + i] ==
                      (i < part ? (unsigned char)(i * 7 + seed * 13 + t->ranks[m] * 29 + i / 251) : 0xee),
                  "part %u of %llu bytes differs at %llu", m, (unsigned long long)part, (unsigned long long)i);
    poison(t, t->a, (t->size - 1) * stride + part);
}

static void
check_gather(bench *t, uint64_t part)
{
    check_gather_apart(t, part, 1);
}

static void
check_reduce(bench *t, uint64_t elems, spw_dtype dtype, spw_dtype sink_dtype, bool add, bool in_place)
{
    uint64_t seed = ++t->seed, bytes = elems * spw_dtype_bytes(dtype), squares = (elems + 4095) / 4096;
    float *want = malloc(elems * sizeof *want + 1), *wide = malloc(elems * sizeof *wide + 1);
    void *expected = malloc(elems * 4 + 1);
    char *sink = in_place ? t->a + t->rank * bytes : malloc(elems * 4 + 1);
    double *sumsq = malloc(squares * sizeof *sumsq + 1);
    fill(t->a, dtype, seed, t->ranks[t->rank], 0, elems * t->size);
    for (uint64_t i = 0; i < elems; i++) {
        want[i] = serial_sum(dtype, seed, t->ranks, t->size, t->rank * elems + i);
        if (add) {
            volatile float before = value(seed, 77, i);
            memcpy(sink + 4 * i, (float *)&(float){before}, 4);
            want[i] = before + want[i];
        }
    }
    spw_convert(expected, sink_dtype, want, SPW_F32, elems);
    spw_convert(wide, SPW_F32, expected, sink_dtype, elems);
    OK(spw_reduce_scatter(t->ch, 7, t->a, dtype, elems,
                          &(spw_reduce_sink){.data = sink, .dtype = sink_dtype, .add = add, .sumsq = sumsq}, err));
    CHECK(memcmp(sink, expected, elems * spw_dtype_bytes(sink_dtype)) == 0, "sum of %llu %s to %s%s%s",
          (unsigned long long)elems, spw_dtype_name(dtype), spw_dtype_name(sink_dtype), add ? ", added" : "",
          in_place ? ", in place" : "");
    for (uint64_t s = 0; s < squares; s++) {
        double square = serial_sumsq(wide + s * 4096, elems - s * 4096 < 4096 ? elems - s * 4096 : 4096);
        CHECK(memcmp(&square, &sumsq[s], sizeof square) == 0, "squares %llu of %llu elements", (unsigned long long)s,
              (unsigned long long)elems);
    }
    for (uint64_t i = 0; i < elems * t->size; i += 97) { /* kept unless it is the sink */
        float kept = summand(dtype, seed, t->ranks[t->rank], i), now;
        spw_convert(&now, SPW_F32, t->a + i * spw_dtype_bytes(dtype), dtype, 1);
        CHECK(in_place ? i / elems == t->rank || kept == now : kept == now, "operand changed at %llu",
              (unsigned long long)i);
    }
    poison(t, t->a, t->size * bytes);
    if (!in_place)
        free(sink);
    free(expected);
    free(want);
    free(wide);
    free(sumsq);
}

static void
check_all_reduce(bench *t, uint64_t elems)
{
    uint64_t seed = ++t->seed;
    float *x = (float *)(void *)t->a;
    fill(x, SPW_F32, seed, t->ranks[t->rank], 0, elems * t->size);
    OK(spw_all_reduce(t->ch, 9, x, elems, err));
    for (uint64_t i = 0; i < elems * t->size; i++)
        CHECK(x[i] == serial_sum(SPW_F32, seed, t->ranks, t->size, i), "element %llu", (unsigned long long)i);
    poison(t, t->a, t->size * elems * 4);
}

static void
check_all_to_all(bench *t, uint64_t part)
{
    uint64_t seed = ++t->seed;
    for (uint32_t m = 0; m < t->size; m++)
        for (uint64_t i = 0; i < part; i++)
            t->a[m * part + i] = (char)(i * 3 + seed + t->ranks[t->rank] * 17 + t->ranks[m] * 5);
    memset(t->b, 77, t->size * part);
    OK(spw_all_to_all(t->ch, 3, t->a, t->b, part, err));
    poison(t, t->a, t->size * part);
    for (uint32_t m = 0; m < t->size; m++)
        for (uint64_t i = 0; i < part; i++)
            CHECK(t->b[m * part + i] ==
                      (m == t->rank ? 77 : (char)(i * 3 + seed + t->ranks[m] * 17 + t->ranks[t->rank] * 5)),
                  "from %u at %llu", m, (unsigned long long)i);
}

/* Pieces of other sizes from each to each, some of them empty, in another order than they lie in. */
static void
check_all_to_all_v(bench *t, uint64_t each)
{
    uint64_t seed = ++t->seed, bytes = 2 * t->size * each;
    spw_comm_piece take[RANKS_MAX] = {{0}}, give[RANKS_MAX] = {{0}};
    for (uint32_t m = 0; m < t->size; m++) {
        uint64_t in = (t->ranks[t->rank] + 2 * t->ranks[m]) % 4, out = (t->ranks[m] + 2 * t->ranks[t->rank]) % 4;
        take[m] = (spw_comm_piece){.from = t->rank * each, .to = (2 * t->size - 1 - m) * each, .bytes = each * in / 3};
        give[m] = (spw_comm_piece){.from = m * each, .bytes = each * out / 3};
        for (uint64_t i = 0; i < each; i++)
            t->a[m * each + i] = (char)(i * 3 + seed + t->ranks[t->rank] * 17 + t->ranks[m] * 5);
    }
    OK(spw_all_to_all_v(t->ch, 4, t->a, bytes, take, give, err));
    for (uint32_t m = 0; m < t->size; m++)
        for (uint64_t i = 0; i < take[m].bytes && m != t->rank; i++)
            CHECK(t->a[take[m].to + i] == (char)(i * 3 + seed + t->ranks[m] * 17 + t->ranks[t->rank] * 5),
                  "from %u at %llu", m, (unsigned long long)i);
    poison(t, t->a, bytes);
    take[(t->rank + 1) % t->size].bytes = bytes - take[(t->rank + 1) % t->size].to + 1;
    CHECK(t->size == 1 || spw_all_to_all_v(t->ch, 4, t->a, bytes, take, give, NULL) == SPW_EINVAL, "beyond its end");
}

/* From rank `bad` on all fail, each in its way; rank `other` says another number. The size: none does. */
static void
check_agreed(bench *t, uint32_t bad, uint32_t other)
{
    spw_word word = {.number = t->rank == other ? -4 : (int64_t)1 << 40};
    spw_error own = {0}, told = {0};
    spw_status st = SPW_OK;
    char want[64];
    if (t->rank >= bad)
        st = SPW_RAISE(&own, t->rank == bad ? SPW_ENOSPC : SPW_EIO, "%u is full", t->rank);
    snprintf(want, sizeof want, "rank %u: %u is full", bad, bad);
    st = spw_agree(t->ch, st, &own, &word, &told);
    CHECK(st == (bad < t->size ? SPW_ENOSPC : SPW_OK) && (st == SPW_OK || strcmp(told.message, want) == 0),
          "agreed: %s for %s", told.message, want);
    CHECK(word.first == bad && word.number == (other == 0 ? -4 : (int64_t)1 << 40), "%u failed, for %u", word.first,
          bad);
    CHECK(word.other == (other < t->size ? other == 0 ? t->size > 1 : other : 0), "%u says another number, for %u",
          word.other, other);
}

static void
check_small(bench *t, uint64_t bytes)
{
    unsigned char mine[SPW_EXCHANGE_MAX], *all = malloc(t->size * SPW_EXCHANGE_MAX);
    unsigned char *any = malloc(bytes * 100 + 1);
    double sums[5], want[5];
    for (uint64_t i = 0; i < bytes; i++)
        mine[i] = (unsigned char)(i + t->ranks[t->rank] * 3 + ++t->seed * 0);
    OK(spw_exchange(t->ch, mine, all, bytes, err));
    memset(mine, 0xee, sizeof mine);
    for (uint32_t m = 0; m < t->size; m++)
        for (uint64_t i = 0; i < bytes; i++)
            CHECK(all[m * bytes + i] == (unsigned char)(i + t->ranks[m] * 3), "exchange of %llu",
                  (unsigned long long)bytes);
    for (int i = 0; i < 5; i++) {
        sums[i] = (double)value(99, t->ranks[t->rank], (uint64_t)i);
        want[i] = (double)value(99, t->ranks[0], (uint64_t)i);
        for (uint32_t m = 1; m < t->size; m++)
            want[i] += (double)value(99, t->ranks[m], (uint64_t)i);
    }
    OK(spw_sum(t->ch, sums, 5, err));
    CHECK(memcmp(sums, want, sizeof sums) == 0, "sum");
    for (uint32_t root = 0; root < t->size; root++) {
        for (uint64_t i = 0; i < bytes * 100; i++)
            any[i] = (unsigned char)(root == t->rank ? i + root : 0xee);
        OK(spw_broadcast(t->ch, any, bytes * 100, root, err));
        for (uint64_t i = 0; i < bytes * 100; i++)
            CHECK(any[i] == (unsigned char)(i + root), "broadcast from %u", root);
    }
    OK(spw_barrier(t->ch, err));
    for (uint32_t m = 0; m <= t->size; m++)
        check_agreed(t, m, t->size - m);
    OK(spw_agree(t->ch, SPW_OK, NULL, NULL, err));
    free(all);
    free(any);
}

static void
check_everything(bench *t, bool large)
{
    static const uint64_t sizes[] = {0, 1, 7, 4095, 4096, 4097, 12289, 50001};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint64_t n = sizes[i];
        if (n > 20000 && !large)
            continue;
        check_gather(t, n);
        if (((t->size - 1) * 3 + 1) * n <= t->bytes)
            check_gather_apart(t, n, 3);
        for (int d = 0; d < SPW_DTYPE_COUNT; d++) {
            check_reduce(t, n, (spw_dtype)d, SPW_F32, false, false);
            if (n > 4097 && !large)
                continue;
            check_reduce(t, n, (spw_dtype)d, SPW_F32, true, false);
            check_reduce(t, n, (spw_dtype)d, (spw_dtype)d, false, true);
            check_reduce(t, n, (spw_dtype)d, SPW_BF16, false, false);
            check_reduce(t, n, (spw_dtype)d, SPW_F16, false, false);
        }
        check_all_reduce(t, n);
        check_all_to_all(t, n);
        if (2 * t->size * n <= t->bytes)
            check_all_to_all_v(t, n);
    }
    check_small(t, 1);
    check_small(t, 1000);
    check_small(t, SPW_EXCHANGE_MAX);
}

/* ---------------------------------------------------------------- opening */

static void
bench_open(bench *t, spw_comm *comm, spw_channel *ch, uint64_t elems)
{
    const spw_comm_info *info = spw_comm_get_info(comm);
    *t = (bench){.comm = comm, .ch = ch, .size = spw_channel_size(ch), .rank = spw_channel_rank(ch)};
    t->bytes = elems * 4 * t->size;
    OK(spw_comm_alloc(comm, (void **)&t->a, elems * 4 * info->world, err));
    t->b = malloc(elems * 4 * info->world);
    CHECK(t->b != NULL, "memory");
    CHECK((uintptr_t)t->a % 4096 == 0 && t->a[0] == 0 && t->a[elems * 4 * info->world - 1] == 0, "alignment, zeroes");
    {
        uint32_t mine = info->rank;
        OK(spw_exchange(ch, &mine, t->ranks, sizeof mine, err));
    }
}

static void
bench_close(bench *t)
{
    spw_comm_free(t->comm, t->a);
    free(t->b);
}

static void
body_everything(const plan *p)
{
    long live = spw_test_live_allocs();
    spw_comm *comm = NULL;
    spw_channel *ch = NULL;
    bench t;
    OK(spw_comm_open(&comm, &p->options, err));
    OK(spw_channel_open(&ch, comm, NULL, 0, "gradients", err));
    bench_open(&t, comm, ch, 50001);
    check_everything(&t, p->variant == 0 && t.size <= 4);
    if (p->variant ==
        0) { /* the same bits when everybody is on one host and when nobody is: the reference knows no hosts */
        check_gather(&t, 200000);
        check_reduce(&t, 50001, SPW_F32, SPW_F32, false, true);
    }
    bench_close(&t);
    spw_channel_close(ch);
    OK(spw_comm_check(comm, err));
    spw_comm_close(comm);
    CHECK(spw_test_live_allocs() == live, "%ld objects are left", spw_test_live_allocs() - live);
}

/* Every collective gives the bits of the serial reference, for any number of ranks on any hosts. */
static void
test_everything(void **state)
{
    (void)state;
    for (int i = 0; i < MIX_COUNT; i += SANITIZED ? 3 : 1)
        plan_run((plan){.hosts = mixes[i],
                        .body = body_everything,
                        .options = {.timeout_s = 30, .staging_bytes = 1},
                        .killed = -1});
}

/* Random delays at every hand-over, and buffers overwritten as soon as a call returns, change nothing. */
static void
test_chaos(void **state)
{
    static const char *const some[] = {"aa", "aabb", "abc"};
    (void)state;
    for (int i = 0; i < 3; i++)
        plan_run((plan){.hosts = some[i],
                        .body = body_everything,
                        .options = {.timeout_s = 30, .chaos_seed = 5 + (uint64_t)i},
                        .variant = 1,
                        .killed = -1});
}

/* ---------------------------------------------------------------- groups, threads, counters */

static void
body_groups(const plan *p)
{
    spw_comm *comm = NULL;
    spw_channel *group = NULL, *pair = NULL;
    const spw_comm_info *info;
    bench t;
    OK(spw_comm_open(&comm, &p->options, err));
    info = spw_comm_get_info(comm);
    OK(spw_channel_open(&group, comm, NULL, info->rank % 2, "odd or even", err));
    CHECK(spw_channel_size(group) == (info->world + 1 - info->rank % 2) / 2, "%u", spw_channel_size(group));
    CHECK(spw_channel_rank(group) == info->rank / 2, "%u", spw_channel_rank(group));
    OK(spw_channel_open(&pair, comm, group, spw_channel_rank(group) / 2, "pair", err));
    bench_open(&t, comm, group, 5000);
    check_gather(&t, 5000);
    check_reduce(&t, 5000, SPW_BF16, SPW_F32, false, false);
    check_all_reduce(&t, 4097);
    bench_close(&t);
    bench_open(&t, comm, pair, 5000);
    check_all_to_all(&t, 333);
    check_all_to_all_v(&t, 334);
    check_reduce(&t, 4999, SPW_F32, SPW_F32, true, false);
    bench_close(&t);
    spw_channel_close(pair);
    spw_channel_close(group);
    spw_comm_close(comm);
}

/* A color makes a group, in the order of ranks, and a group can be split again. */
static void
test_groups(void **state)
{
    static const char *const some[] = {"aaaa", "aabb", "abab", "aabbaccb"};
    (void)state;
    for (int i = 0; i < 4; i++)
        plan_run((plan){.hosts = some[i], .body = body_groups, .options = {.timeout_s = 30}, .killed = -1});
}

typedef struct worker {
    bench t;
    int rounds;
} worker;

static void *
work(void *arg)
{
    worker *w = arg;
    for (int i = 0; i < w->rounds; i++) {
        check_gather(&w->t, 3000 + (uint64_t)i);
        check_reduce(&w->t, 4097, SPW_F32, SPW_F32, false, true);
        check_all_reduce(&w->t, 100);
    }
    return NULL;
}

static void
body_threads(const plan *p)
{
    enum { THREADS = 3 };
    spw_comm *comm = NULL;
    spw_channel *channels[THREADS];
    pthread_t threads[THREADS];
    worker workers[THREADS];
    OK(spw_comm_open(&comm, &p->options, err));
    for (int i = 0; i < THREADS; i++) {
        OK(spw_channel_open(&channels[i], comm, NULL, 0, "of a thread", err));
        bench_open(&workers[i].t, comm, channels[i], 5000);
        workers[i].t.seed = (uint64_t)i * 1000;
        workers[i].rounds = 10 + 5 * i;
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0, "thread");
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < THREADS; i++) {
        bench_close(&workers[i].t);
        spw_channel_close(channels[i]);
    }
    spw_comm_close(comm);
}

/* Channels of different threads work at once and do not touch each other. */
static void
test_threads(void **state)
{
    static const char *const some[] = {"aa", "ab", "aabb"};
    (void)state;
    for (int i = 0; i < 3; i++)
        plan_run((plan){
            .hosts = some[i], .body = body_threads, .options = {.timeout_s = 30, .chaos_seed = 3}, .killed = -1});
}

static void
body_counters(const plan *p)
{
    enum { PART = 40960 };
    spw_comm *comm = NULL;
    spw_channel *ch = NULL;
    spw_comm_stats s;
    const spw_comm_info *info;
    uint64_t near, far;
    bench t;
    OK(spw_comm_open(&comm, &p->options, err));
    info = spw_comm_get_info(comm);
    near = info->local_world - 1;
    far = info->world - info->local_world;
    OK(spw_channel_open(&ch, comm, NULL, 0, "counted", err));
    bench_open(&t, comm, ch, PART);
    for (int i = 0; i < 3; i++) {
        check_gather(&t, PART);
        check_reduce(&t, PART, SPW_BF16, SPW_F32, false, false);
        check_all_reduce(&t, 4096);
    }
    spw_channel_get_stats(ch, &s);
    CHECK(s.op[SPW_COLL_ALL_GATHER].calls == 3, "calls");
    CHECK(s.op[SPW_COLL_ALL_GATHER].local_bytes == 3 * near * PART, "%llu", (unsigned long long)s.op[0].local_bytes);
    CHECK(s.op[SPW_COLL_ALL_GATHER].remote_bytes == 3 * far * PART, "%llu", (unsigned long long)s.op[0].remote_bytes);
    CHECK(s.op[SPW_COLL_REDUCE_SCATTER].local_bytes == 3 * near * PART * 2, "bytes");
    CHECK(s.op[SPW_COLL_REDUCE_SCATTER].remote_bytes == 3 * far * PART * 2, "bytes");
    CHECK(s.op[SPW_COLL_ALL_REDUCE].local_bytes + s.op[SPW_COLL_ALL_REDUCE].remote_bytes ==
              3 * 2 * (info->world - 1) * 4096ull * 4, /* 2 (N-1)/N of N parts */
          "bytes");
    CHECK(s.op[SPW_COLL_ALL_GATHER].busy_ns >= s.op[SPW_COLL_ALL_GATHER].wait_ns && s.op[0].busy_ns > 0, "times");
    bench_close(&t);
    spw_channel_close(ch);
    spw_comm_close(comm);
}

/* What a rank gets from others is (N-1)/N of the whole, by where they are, to the byte. */
static void
test_counters(void **state)
{
    static const char *const some[] = {"aa", "ab", "aaab", "aabb"};
    (void)state;
    for (int i = 0; i < 4; i++)
        plan_run((plan){.hosts = some[i], .body = body_counters, .options = {.timeout_s = 30}, .killed = -1});
}

/* Rank 0 is bound to one CPU before it joins, where there are several. */
static void
body_sharers(const plan *p)
{
    spw_comm *comm = NULL;
    const spw_comm_info *info;
    spw_id_set all, cpus = {{0}};
    bool several;
    spw_cpu_affinity(&all);
    several = spw_id_set_count(&all) > 1;
    if (p->variant == 1 && strcmp(getenv("RANK"), "0") == 0) {
        uint32_t cpu = 0;
        spw_seat seat = {.bound = true};
        while (!spw_id_set_has(&all, cpu))
            cpu++;
        spw_id_set_add(&cpus, cpu);
        seat.cpus = cpus;
        spw_seat_apply(&seat, pthread_self());
    }
    OK(spw_comm_open(&comm, &p->options, err));
    info = spw_comm_get_info(comm);
    if (p->variant == 0 || !several)
        CHECK(info->cpu_sharers == info->local_world, "%u of %u", info->cpu_sharers, info->local_world);
    else if (info->rank == 0)
        CHECK(info->cpu_sharers == 1, "%u", info->cpu_sharers);
    else
        CHECK(info->cpu_sharers == info->local_world - (info->host == 0), "%u", info->cpu_sharers);
    spw_comm_close(comm);
}

/* Ranks that may use the same CPUs share them; one that its launcher bound elsewhere has its own, as one of another host. */
static void
test_sharers(void **state)
{
    (void)state;
    for (int variant = 0; variant < 2; variant++) {
        plan_run((plan){
            .hosts = "aaa", .body = body_sharers, .options = {.timeout_s = 30}, .variant = variant, .killed = -1});
        plan_run((plan){
            .hosts = "aabb", .body = body_sharers, .options = {.timeout_s = 30}, .variant = variant, .killed = -1});
    }
}

static void
body_slow_link(const plan *p)
{
    spw_comm *comm = NULL;
    bench t;
    spw_channel *ch = NULL;
    uint64_t begin;
    OK(spw_comm_open(&comm, &p->options, err));
    OK(spw_channel_open(&ch, comm, NULL, 0, "slow", err));
    bench_open(&t, comm, ch, 25000);
    begin = spw_now_ns();
    OK(spw_all_gather(ch, 1, t.a, 100000, err));
    CHECK(spw_now_ns() - begin >= 110000000, "%llu ns", (unsigned long long)(spw_now_ns() - begin));
    bench_close(&t);
    spw_channel_close(ch);
    spw_comm_close(comm);
}

/* An operation takes its bytes over link_bytes_per_s, and link_latency_s on top. */
static void
test_slow_link(void **state)
{
    (void)state;
    plan_run((plan){.hosts = "aa",
                    .body = body_slow_link,
                    .options = {.timeout_s = 30, .link_bytes_per_s = 1e6, .link_latency_s = 0.01},
                    .killed = -1});
}

static void
body_device_order(const plan *p)
{
    enum { N = 10000 };
    spw_comm *comm = NULL;
    spw_channel *ch = NULL;
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    double ours[3], theirs[3];
    float *copy = malloc(N * sizeof *copy), *x;
    bench t;
    OK(spw_comm_open(&comm, &p->options, err));
    OK(spw_channel_open(&ch, comm, NULL, 0, "squares", err));
    bench_open(&t, comm, ch, N);
    x = (float *)(void *)t.a;
    fill(x, SPW_F32, 4, 0, 0, N * t.size);
    OK(spw_reduce_scatter(ch, 1, x, SPW_F32, N,
                          &(spw_reduce_sink){.data = x + t.rank * N, .dtype = SPW_F32, .sumsq = ours}, err));
    OK(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 1}, err));
    OK(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, err));
    spw_gpu_copy_d2h(q, copy, SPW_F32, x + t.rank * N, SPW_F32, N, theirs);
    spw_gpu_queue_sync(q);
    CHECK(memcmp(ours, theirs, sizeof ours) == 0, "%a %a", ours[0], theirs[0]);
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
    free(copy);
    bench_close(&t);
    spw_channel_close(ch);
    spw_comm_close(comm);
}

/* Squares are summed in the order of spw_gpu_copy_d2h. */
static void
test_device_order(void **state)
{
    (void)state;
    plan_run((plan){.hosts = "aa", .body = body_device_order, .options = {.timeout_s = 30}, .killed = -1});
}

/* ---------------------------------------------------------------- memory and arguments */

/* The last rank cannot, at its k-th try, for every k: no rank gets it, and all know whose fault it is. */
static void
fail_one_by_one(spw_comm *comm, void (*set_fault)(unsigned), bool channel)
{
    const spw_comm_info *info = spw_comm_get_info(comm);
    bool last = info->rank == info->world - 1;
    char who[16];
    snprintf(who, sizeof who, "rank %u", info->world - 1);
    for (unsigned k = 1;; k++) {
        long live = spw_test_live_allocs();
        spw_error e = {0};
        void *p = NULL;
        spw_channel *ch = NULL;
        spw_status st;
        if (last)
            set_fault(k);
        st = channel ? spw_channel_open(&ch, comm, NULL, 0, "channel", &e) : spw_comm_alloc(comm, &p, 100000, &e);
        set_fault(0);
        if (st == SPW_OK) {
            spw_comm_free(comm, p);
            spw_channel_close(ch);
            return;
        }
        CHECK(p == NULL && ch == NULL && strstr(e.message, who) != NULL, "%s", e.message);
        CHECK(spw_test_live_allocs() == live, "%ld objects are left", spw_test_live_allocs() - live);
    }
}

static void
body_memory(const plan *p)
{
    spw_comm *comm = NULL;
    spw_channel *ch = NULL;
    spw_error e = {0};
    void *many[SPW_COMM_ALLOCS_MAX], *more = NULL;
    char small[64];
    OK(spw_comm_open(&comm, &p->options, err));
    OK(spw_channel_open(&ch, comm, NULL, 0, "memory", err));
    for (int i = 0; i < SPW_COMM_ALLOCS_MAX; i++)
        OK(spw_comm_alloc(comm, &many[i], (uint64_t)i * 5000, err));
    CHECK(spw_comm_alloc(comm, &more, 1, &e) == SPW_ENOMEM && more == NULL, "%s", e.message);
    spw_comm_free(comm, many[3]);
    many[3] = NULL;
    fail_one_by_one(comm, spw_test_fail_alloc, false);
    fail_one_by_one(comm, spw_test_fail_call, false);
    fail_one_by_one(comm, spw_test_fail_alloc, true);
    fail_one_by_one(comm, spw_test_fail_call, true);
    CHECK(spw_comm_alloc(comm, &more, 1ull << 60, &e) == SPW_ENOMEM && more == NULL, "%s", e.message);
    /* a caller's mistake is its own: nothing was said to others, and the world goes on */
    CHECK(spw_all_gather(ch, 1, small, 4, &e) == SPW_EINVAL, "any memory");
    CHECK(spw_all_gather(ch, 1, many[1], 1ull << 40, &e) == SPW_EINVAL, "too large");
    CHECK(spw_reduce_scatter(ch, 1, many[5], SPW_F32, 1,
                             &(spw_reduce_sink){.data = small, .dtype = SPW_BF16, .add = true}, &e) == SPW_EINVAL,
          "adding to bf16");
    CHECK(spw_broadcast(ch, small, 4, 9, &e) == SPW_EINVAL, "root");
    CHECK(spw_exchange(ch, small, small, 5000, &e) == SPW_EINVAL, "exchange of 5000");
    OK(spw_comm_check(comm, err));
    OK(spw_barrier(ch, err));
    for (int i = 0; i < SPW_COMM_ALLOCS_MAX; i++)
        spw_comm_free(comm, many[i]);
    spw_channel_close(ch);
    spw_comm_close(comm);
}

/* Allocation fails on all ranks if it fails on one; mistakes in arguments change nothing. */
static void
test_memory(void **state)
{
    static const char *const some[] = {"a", "aaa", "aab"};
    (void)state;
    for (int i = 0; i < 3; i++)
        plan_run((plan){.hosts = some[i], .body = body_memory, .options = {.timeout_s = 60}, .killed = -1});
}

/* ---------------------------------------------------------------- failures */

enum { DIES, SKIPS, OTHER_SIZE, OTHER_UNIT, OTHER_OP, ABORTS, SLEEPS, FAILURE_COUNT };
enum { OUT_OF_THE_LAST_US = 2000000 }; /* until nobody is in the gather before any more, also on a busy machine */

static void
body_failure(const plan *p)
{
    spw_comm *comm = NULL;
    spw_channel *ch = NULL, *other = NULL;
    spw_error e = {0}, again = {0};
    bench t;
    uint64_t begin, took;
    uint32_t culprit, unit = 7;
    uint64_t part = 8192;
    bool guilty;
    OK(spw_comm_open(&comm, &p->options, err));
    OK(spw_channel_open(&ch, comm, NULL, 0, "weights", err));
    OK(spw_channel_open(&other, comm, NULL, 0, "gradients", err));
    bench_open(&t, comm, ch, 10000);
    culprit = t.size - 1;
    guilty = t.rank == culprit;
    check_gather(&t, 100);
    if (p->variant == SLEEPS)
        spw_channel_set_timeout(ch, 1);
    begin = spw_now_ns();
    if (guilty) {
        switch (p->variant) {
        case DIES:
            usleep(OUT_OF_THE_LAST_US);
            raise(SIGKILL);
            break;
        case OTHER_SIZE: part += 1; break;
        case OTHER_UNIT: unit = 8; break;
        case ABORTS:
            usleep(OUT_OF_THE_LAST_US);
            spw_comm_abort(comm, "the disk of this rank is full");
            break;
        case SLEEPS:
            while (spw_comm_check(comm, NULL) == SPW_OK) /* however late the others begin to wait */
                usleep(10000);
            break;
        default: break;
        }
    }
    if (guilty && p->variant == OTHER_OP)
        (void)spw_all_to_all(ch, unit, t.a, t.b, part, &e);
    else if (guilty && p->variant == SKIPS)
        (void)spw_barrier(ch, &e);
    else
        (void)spw_all_gather(ch, unit, t.a, part, &e);
    took = spw_now_ns() - begin;
    switch (p->variant) {
    case DIES: expect(&e, SPW_EIO, "has ended (pid", "all_gather of unit 7"); break;
    case SKIPS: expect(&e, SPW_EINVAL, "barrier", "all_gather of unit 7, 8192 bytes"); break;
    case OTHER_SIZE: expect(&e, SPW_EINVAL, "8193 bytes", "8192 bytes"); break;
    case OTHER_UNIT: expect(&e, SPW_EINVAL, "unit 7", "unit 8"); break;
    case OTHER_OP: expect(&e, SPW_EINVAL, "all_to_all of unit 7", "all_gather of unit 7"); break;
    case ABORTS: expect(&e, SPW_ECANCELED, "gave up: the disk of this rank is full", "rank"); break;
    case SLEEPS: expect(&e, SPW_ETIMEDOUT, "waited 1.0 s for others on channel weights", "in no call; last was"); break;
    default: break;
    }
    if (p->variant != SLEEPS) /* at once */
        CHECK(took < AT_ONCE_NS, "took %.1f s", (double)took * 1e-9);
    CHECK(spw_barrier(other, &again) == e.status && strcmp(again.message, e.message) == 0, "%s", again.message);
    CHECK(spw_comm_check(comm, &again) == e.status, "%s", again.message);
    begin = spw_now_ns();
    bench_close(&t);
    spw_channel_close(other);
    spw_channel_close(ch);
    spw_comm_close(comm);
    CHECK(spw_now_ns() - begin < AT_ONCE_NS, "closing took %.1f s", (double)(spw_now_ns() - begin) * 1e-9);
}

/* Somebody else cuts the network while ranks work; nothing but the timeout can notice. */
static void
body_cut(const plan *p)
{
    spw_comm *comm = NULL;
    spw_channel *ch = NULL;
    spw_error e = {0};
    bench t;
    uint64_t begin = spw_now_ns();
    OK(spw_comm_open(&comm, &p->options, err));
    OK(spw_channel_open(&ch, comm, NULL, 0, "cut", err));
    bench_open(&t, comm, ch, 10000);
    spw_channel_set_timeout(ch, 1);
    if (t.rank == 0)
        fprintf(stderr, "ready\n");
    while (spw_all_gather(ch, 1, t.a, 10000, &e) == SPW_OK)
        CHECK(spw_now_ns() - begin < 60000000000u, "nothing was cut");
    CHECK(e.status == SPW_ETIMEDOUT || e.status == SPW_EIO, "%s", e.message);
    begin = spw_now_ns();
    bench_close(&t);
    spw_channel_close(ch);
    spw_comm_close(comm);
    CHECK(spw_now_ns() - begin < AT_ONCE_NS, "closing took %.1f s", (double)(spw_now_ns() - begin) * 1e-9);
}

static void
fail_as(int variant)
{
    static const char *const some[] = {"aa", "ab", "aaab", "aabb"};
    plan worlds[4];
    for (int i = 0; i < 4; i++)
        worlds[i] = (plan){.hosts = some[i],
                           .body = body_failure,
                           .options = {.timeout_s = 60}, /* far from what a slow machine takes */
                           .variant = variant,
                           .killed = variant == DIES ? (int)strlen(some[i]) - 1 : -1};
    plans_run(worlds, 4);
}

/* A rank that is killed inside an operation: the others learn it at once, not by the timeout. */
static void
test_killed(void **state)
{
    (void)state;
    fail_as(DIES);
}

/* Calls that differ are found by everybody: a collective left out, another size, another unit, another operation. */
static void
test_mismatch(void **state)
{
    (void)state;
    fail_as(SKIPS);
    fail_as(OTHER_SIZE);
    fail_as(OTHER_UNIT);
    fail_as(OTHER_OP);
}

/* spw_comm_abort() reaches ranks that wait, with its reason. */
static void
test_abort(void **state)
{
    (void)state;
    fail_as(ABORTS);
}

/* A rank that does not come in time. */
static void
test_late(void **state)
{
    (void)state;
    fail_as(SLEEPS);
}

static void
body_stopped(const plan *p)
{
    spw_comm *comm = NULL;
    spw_channel *ch = NULL;
    bench t;
    OK(spw_comm_open(&comm, &p->options, err));
    OK(spw_channel_open(&ch, comm, NULL, 0, "weights", err));
    bench_open(&t, comm, ch, 10000);
    spw_channel_set_timeout(ch, 3);
    ++*p->ready;
    if (t.rank + 1 == t.size)
        usleep(800000);
    check_gather(&t, 100);
    bench_close(&t);
    spw_channel_close(ch);
    spw_comm_close(comm);
}

/* Ranks that are stopped together for longer than one waits for another go on. */
static void
test_stopped(void **state)
{
    static const char *const some[] = {"aa", "ab", "aaab"};
    plan worlds[3];
    (void)state;
    for (int i = 0; i < 3; i++)
        worlds[i] = (plan){.hosts = some[i],
                           .body = body_stopped,
                           .options = {.timeout_s = 30},
                           .killed = -1,
                           .ready = ranks_share(sizeof(int))};
    plans_run(worlds, 3);
    for (int i = 0; i < 3; i++)
        ranks_unshare((void *)worlds[i].ready, sizeof(int));
}

/* ---------------------------------------------------------------- */

/* Of the sanitizer, where there is one: at exit MPI has unloaded parts of itself, and their leaks have no name any more. */
int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

/* The last thing that a rank under MPI does: says whether it has left MPI as one should. */
static void
say_finalized(void)
{
    void *symbol = dlsym(RTLD_DEFAULT, "MPI_Finalized");
    int (*finalized)(int *) = NULL;
    int ended = 0;
    memcpy(&finalized, &symbol, sizeof finalized);
    if (finalized != NULL && finalized(&ended) == 0 && ended)
        printf("# finalized\n");
}

/* One rank of a world that somebody else started: does everything, or, where another thing is tested (SPW_TEST_BRIEF), only a little before it. */
static int
main_as_rank(void)
{
    static const int variants[] = {0, 1};
    const bool brief = getenv("SPW_TEST_BRIEF") != NULL;
    (void)atexit(say_finalized); /* before MPI is loaded: what is said first runs last */
    if (getenv("RANK") == NULL)
        setenv("RANK", getenv("OMPI_COMM_WORLD_RANK") != NULL ? getenv("OMPI_COMM_WORLD_RANK") : "?", 1);
    for (size_t i = 0; i < 2 && !brief; i++)
        body_everything(&(plan){.options = {.timeout_s = 60, .chaos_seed = (uint64_t)i, .staging_bytes = 1},
                                .variant = variants[i]});
    body_counters(&(plan){.options = {.timeout_s = 60}});
    if (!brief)
        body_threads(&(plan){.options = {.timeout_s = 60, .chaos_seed = 9}});
    if (getenv("SPW_TEST_CUT") != NULL)
        body_cut(&(plan){.options = {.timeout_s = 60}});
    else if (getenv("SPW_TEST_FAILURE") != NULL)
        body_failure(&(plan){.options = {.timeout_s = 60}, .variant = atoi(getenv("SPW_TEST_FAILURE"))});
    if (__lsan_do_recoverable_leak_check != NULL && getenv("SPW_TEST_LEAKS") != NULL)
        CHECK(__lsan_do_recoverable_leak_check() == 0, "leaks");
    if (strcmp(getenv("RANK"), "0") == 0)
        printf("ok 1 - a rank's checks\n");
    return 0;
}

/*
 * One of two ranks under MPI, with nothing but the transport: what comes after a link was closed does not land where the link was
 * to receive, but with the next one that has its number.
 */
static int
main_as_link(void)
{
    enum { BYTES = 100000 };
    static char sent[BYTES], gone[BYTES], came[BYTES], both[2];
    const uint64_t until = spw_now_ns() + 60000000000u;
    spw__transport *t;
    spw__link *first, *second;
    spw__flow *flow;
    uint32_t peer;
    (void)atexit(say_finalized);
    OK(spw__mpi_load(&t, until, err));
    CHECK(t->world == 2, "%u ranks", t->world);
    peer = 1 - t->rank;
    OK(t->link_create(t, &first, 7, &peer, 1, err));
    OK(t->link_create(t, &second, 7, &peer, 1, err));
    first->recv[0] = (spw__flow){.at = gone, .left = BYTES};
    CHECK(t->progress(first, 0) == 0, "rank %u has sent nothing", peer);
    t->link_close(first);
    OK(t->gather(t, "x", both, 1, until, err));
    memset(sent, 'b', BYTES);
    flow = t->rank == 0 ? second->recv : second->send;
    *flow = (spw__flow){.at = t->rank == 0 ? came : sent, .left = BYTES};
    while (flow->left > 0 && spw_now_ns() < until)
        CHECK(t->progress(second, 50) >= 0, "the link is gone");
    CHECK(flow->left == 0 && gone[0] == 0 && came[BYTES - 1] == (t->rank == 0 ? 'b' : 0), "it went elsewhere");
    t->link_close(second);
    t->close(t, false);
    if (peer == 1)
        printf("ok 1 - a link's memory\n");
    return 0;
}

int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_everything),   cmocka_unit_test(test_chaos),    cmocka_unit_test(test_groups),
        cmocka_unit_test(test_threads),      cmocka_unit_test(test_counters), cmocka_unit_test(test_slow_link),
        cmocka_unit_test(test_device_order), cmocka_unit_test(test_memory),   cmocka_unit_test(test_killed),
        cmocka_unit_test(test_mismatch),     cmocka_unit_test(test_abort),    cmocka_unit_test(test_late),
        cmocka_unit_test(test_stopped),      cmocka_unit_test(test_sharers),
    };
    if (argc > 1 && strcmp(argv[1], "rank") == 0)
        return main_as_rank();
    if (argc > 1 && strcmp(argv[1], "link") == 0)
        return main_as_link();
    return cmocka_run_group_tests_name("comm", tests, NULL, NULL);
}
