/* The ground floor: half floats against doubles, Philox against its published answers, sizes, errors, pool, regions. */
#include "convert.h"
#include "spw_base.h"
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

/* The value of a half with e exponent and m mantissa bits, by definition. */
static double
half_value(uint16_t h, int e_bits, int m_bits)
{
    int e = (h >> m_bits) & ((1 << e_bits) - 1), bias = (1 << (e_bits - 1)) - 1, m = h & ((1 << m_bits) - 1);
    double sign = h & 0x8000 ? -1 : 1;
    if (e == (1 << e_bits) - 1)
        return m ? NAN : sign * INFINITY;
    return e == 0 ? sign * ldexp(m, 1 - bias - m_bits) : sign * ldexp((1 << m_bits) + m, e - bias - m_bits);
}

/* All 65536 bf16 and fp16 values widen exactly; floats between two neighbours go to the nearer, ties to even. */
static void
test_halves(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t h = (uint16_t)i;
        double b = half_value(h, 8, 7), f = half_value(h, 5, 10);
        assert_true(isnan(b) ? isnan(spw_bf16_to_f32(h)) : (double)spw_bf16_to_f32(h) == b);
        assert_true(isnan(f) ? isnan(spw_f16_to_f32(h)) : (double)spw_f16_to_f32(h) == f);
        if (!isnan(b))
            assert_int_equal(spw_f32_to_bf16((float)b), h);
        if (!isnan(f))
            assert_int_equal(spw_f32_to_f16((float)f), h);
        if ((h & 0x7fff) < 0x7bff) { /* fp16 and its upper neighbour; the midpoint is exact in fp32 */
            double up = half_value((uint16_t)(h + 1), 5, 10), mid = (f + up) / 2;
            assert_int_equal(spw_f32_to_f16((float)mid), h % 2 == 0 ? h : h + 1);
            assert_int_equal(spw_f32_to_f16(nextafterf((float)mid, (float)f)), h);
            assert_int_equal(spw_f32_to_f16(nextafterf((float)mid, (float)up)), h + 1);
        }
    }
    assert_int_equal(spw_f32_to_f16(65519.0f), 0x7bff);
    assert_int_equal(spw_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(spw_f32_to_bf16(3.4e38f), 0x7f80);
    assert_true(isnan(spw_bf16_to_f32(spw_f32_to_bf16(spw_bits_f32(0x7f800001u)))));
    assert_true(isnan(spw_f16_to_f32(spw_f32_to_f16(NAN))));
}

/* Conversion of arrays is conversion of elements, in every pair of types. */
static void
test_convert(void **state)
{
    enum { N = 1003 };
    static float wide[N], back[N];
    static uint16_t half[N], other[N];
    (void)state;
    for (int i = 0; i < N; i++)
        wide[i] = (float)(i - 500) * 0.37f;
    spw_convert(half, SPW_BF16, wide, SPW_F32, N);
    spw_convert(back, SPW_F32, half, SPW_BF16, N);
    for (int i = 0; i < N; i++)
        assert_true(half[i] == spw_f32_to_bf16(wide[i]) && back[i] == spw_bf16_to_f32(half[i]));
    spw_convert(other, SPW_F16, half, SPW_BF16, N);
    for (int i = 0; i < N; i++)
        assert_int_equal(other[i], spw_f32_to_f16(back[i]));
}

/* Every instruction set's are the elements' bits: all halves, NaNs too, floats of every kind, and nothing behind the end. */
static void
test_convert_every_isa(void **state)
{
    enum { N = 65536 + 64 };
    static float wide[N];
    static uint16_t half[N], narrow[N];
    (void)state;
    for (uint32_t i = 0; i < N; i++)
        half[i] = (uint16_t)i;
    for (int isa = SPW_ISA_SCALAR; isa <= SPW_ISA_AVX512; isa++) {
        spw__convert_fn *convert = isa == SPW_ISA_AVX512 ? spw__convert_avx512
                                   : isa == SPW_ISA_AVX2 ? spw__convert_avx2
                                                         : spw__convert_scalar;
        for (int type = SPW_BF16; type <= SPW_F16 && spw_cpu_has((spw_isa)isa); type++)
            for (uint32_t n = N - 40; n < N; n += 13) {
                wide[n] = 77.0f;
                narrow[n] = 77;
                convert(wide, SPW_F32, half, (spw_dtype)type, n);
                for (uint32_t i = 0; i < n; i++)
                    assert_int_equal(spw_f32_bits(wide[i]), spw_f32_bits(type == SPW_BF16 ? spw_bf16_to_f32(half[i])
                                                                                          : spw_f16_to_f32(half[i])));
                assert_true(wide[n] == 77.0f);
                for (uint32_t i = 0; i < n; i++)
                    wide[i] = spw_bits_f32(i * 2654435761u);
                convert(narrow, (spw_dtype)type, wide, SPW_F32, n);
                for (uint32_t i = 0; i < n; i++)
                    assert_int_equal(narrow[i], type == SPW_BF16 ? spw_f32_to_bf16(wide[i]) : spw_f32_to_f16(wide[i]));
                assert_int_equal(narrow[n], 77);
            }
    }
}

/* Philox4x32-10 gives the answers published with it (Random123's known-answer vectors). */
static void
test_philox(void **state)
{
    uint32_t r[4];
    (void)state;
    spw_philox(0, 0, 0, r);
    assert_true(r[0] == 0x6627e8d5u && r[1] == 0xe169c58du && r[2] == 0xbc57ac4cu && r[3] == 0x9b00dbd8u);
    spw_philox(UINT64_MAX, UINT64_MAX, UINT64_MAX, r);
    assert_true(r[0] == 0x408f276du && r[1] == 0x41c83b0eu && r[2] == 0xa20bc7c6u && r[3] == 0x6d5451fdu);
    assert_true(spw_uniform_f32(0xffffffffu) < 1.0f && spw_uniform_f32(0) == 0.0f);
}

/* Sizes as people write them; what is not a size is refused. */
static void
test_bytes(void **state)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"4096", 4096}, {"256MiB", 256u << 20}, {"1.5GiB", 3ull << 29}, {"10KB", 10000}, {"2 GB", 2000000000},
                {"0", 0},       {"8G", 8ull << 30},     {"1.5 M", 3u << 19}};
    static const char *const bad[] = {"",      "-1",      "1XB", "MiB", "1e300",         "nan",
                                      "0x10 ", "12 MiBs", "8g",  "8Gi", "99999999999TiB"};
    char text[32];
    uint64_t n;
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        assert_true(spw_parse_bytes(good[i].text, &n));
        assert_true(n == good[i].bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (spw_parse_bytes(bad[i], &n))
            fail_msg("\"%s\" was taken for %llu bytes", bad[i], (unsigned long long)n);
    }
    assert_string_equal(spw_format_bytes(text, sizeof text, 1610612736), "1.50 GiB");
    assert_string_equal(spw_format_bytes(text, sizeof text, 12), "12 B");
}

/* The first error stays, phrases go in front, and a text that is too long loses its end, not its start. */
static void
test_errors(void **state)
{
    spw_error err = {0}, second = {0};
    char longer[2000];
    (void)state;
    assert_int_equal(SPW_RAISE_SYS(&err, 28, "write %s", "x"), SPW_ENOSPC);
    assert_non_null(strstr(err.message, "write x: "));
    spw_error_wrap(&err, "saving %d", 3);
    assert_memory_equal(err.message, "saving 3: write x: ", 19);
    assert_null(strstr(err.message, "ulimit"));
    SPW_RAISE_SYS(&second, EMFILE, "open");
    assert_non_null(strstr(second.message, "(limit: ulimit -n)"));
    SPW_RAISE_SYS(&second, EFBIG, "write");
    assert_non_null(strstr(second.message, "(limit: ulimit -f, or"));
    SPW_RAISE(&second, SPW_EIO, "later");
    spw_error_keep_first(&err, &second);
    assert_int_equal(err.status, SPW_ENOSPC);
    memset(longer, 'a', sizeof longer);
    longer[sizeof longer - 1] = '\0';
    SPW_RAISE(&err, SPW_EIO, "%s", longer);
    spw_error_wrap(&err, "front");
    spw_error_wrap(&err, "%s", longer);
    assert_int_equal(strlen(err.message), sizeof err.message - 1);
    spw_error_wrap(NULL, "nothing to do");
    assert_int_equal(SPW_RAISE(NULL, SPW_EBUSY, "nobody listens"), SPW_EBUSY);
    assert_string_equal(spw_status_name(SPW_ENONFINITE), "SPW_ENONFINITE");
}

typedef struct pool_job {
    uint32_t hits[1000];
} pool_job;

static void
hit(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    (void)worker_idx;
    __atomic_add_fetch(&((pool_job *)ctx)->hits[part_idx], 1, __ATOMIC_RELAXED);
}

/* Every part runs once, whatever the number of threads and jobs; a NULL pool runs them inline. */
static void
test_pool(void **state)
{
    (void)state;
    for (uint32_t threads = 0; threads <= 5; threads++) {
        spw_pool *pool = NULL;
        if (threads > 0)
            assert_int_equal(spw_pool_create(&pool, threads, "test", NULL), SPW_OK);
        for (uint32_t round = 0; round < 300; round++) {
            pool_job job = {{0}};
            uint32_t parts = round * 7 % 1000;
            spw_pool_run(pool, parts, hit, &job);
            for (uint32_t i = 0; i < 1000; i++)
                assert_int_equal(job.hits[i], i < parts ? 1 : 0);
        }
        for (uint32_t round = 0; round < 5000; round++) { /* back to back: workers come late to most of them */
            pool_job job = {{0}};
            uint32_t parts = 2 + round % 5;
            spw_pool_run(pool, parts, hit, &job);
            for (uint32_t i = 0; i < 8; i++)
                assert_int_equal(job.hits[i], i < parts ? 1 : 0);
        }
        assert_int_equal(spw_pool_threads(pool), threads > 0 ? threads : 1);
        spw_pool_destroy(pool);
    }
}

/* Regions are counted while they live, and carving hands out page-aligned parts until there are none. */
static void
test_regions(void **state)
{
    const uint64_t before = spw_region_bytes_live(), whole = spw_round_up(10000, (uint64_t)sysconf(_SC_PAGESIZE));
    spw_region r;
    spw_carve carve;
    (void)state;
    assert_int_equal(spw_region_map(&r, 10000, 0, NULL), SPW_OK);
    assert_int_equal(r.bytes, whole);
    assert_int_equal(spw_region_bytes_live() - before, whole);
    carve = (spw_carve){.base = r.base, .bytes = 12288};
    assert_ptr_equal(spw_carve_take(&carve, 1), r.base);
    assert_ptr_equal(spw_carve_take(&carve, 4097), (char *)r.base + 4096);
    assert_null(spw_carve_take(&carve, 1));
    spw_region_unmap(&r);
    assert_int_equal(spw_region_bytes_live(), before);
    assert_int_equal(spw_region_map(&r, UINT64_MAX - 5, 0, NULL), SPW_ENOMEM);
    spw_region_unmap(&r);
}

/* Every page of a region that threads share is there at once, to its odd end; without memory for threads too. */
static void
test_large_region(void **state)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), bytes = (1ull << 30) + (1 << 26) + 3 * page;
    unsigned char *resident = malloc(bytes / 4096); /* an emulator of larger pages counts its own */
    (void)state;
    assert_non_null(resident);
    for (unsigned fail = 0; fail < 2; fail++) {
        spw_region r;
        uint64_t count = 0;
        spw_test_fail_alloc(fail > 0 ? 2 : 0); /* the first is the region's */
        assert_int_equal(spw_region_map(&r, bytes, 0, NULL), SPW_OK);
        assert_true(spw_test_fault_fired() == (fail > 0));
        spw_test_fail_alloc(0);
        assert_int_equal(mincore(r.base, r.bytes, resident), 0);
        for (uint64_t i = 0; i < r.bytes / page; i++)
            count += resident[i] & 1;
        assert_int_equal(count, bytes / page);
        spw_region_unmap(&r);
    }
    free(resident);
}

/* The kernel's own view of a thread (sched_getattr(2)): slice in ns and nice value. */
static uint64_t
slice_of_this_thread(int *nice_value)
{
    uint64_t attr[7] = {0};
    assert_int_equal(syscall(SYS_sched_getattr, 0, attr, sizeof attr, 0), 0);
    *nice_value = (int)(int32_t)(attr[2] & 0xffffffffu);
    return attr[3];
}

static void *
prompt_main(void *arg)
{
    uint64_t *slice = arg;
    int nice_before, nice_after;
    bool raised;
    assert_int_equal(setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 19),
                     0); /* this thread's; the lowest, which all may take */
    slice[0] = slice_of_this_thread(&nice_before);
    raised = spw_thread_be_prompt();
    slice[1] = slice_of_this_thread(&nice_after);
    assert_int_equal(nice_after, raised ? nice_before - 10 : nice_before);
    if (!raised) /* then nobody here may do it */
        assert_int_equal(setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), nice_before - 10), -1);
    return NULL;
}

static void
test_prompt(void **state)
{
    uint64_t slice[2] = {0, 0};
    pthread_t thread;
    (void)state;
    assert_int_equal(pthread_create(&thread, NULL, prompt_main, slice), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    if (slice[0] == 0)
        skip(); /* a kernel that has no slices of one's own */
    assert_true(slice[0] > 100000);
    assert_int_equal(slice[1], 100000);
}

typedef struct contender {
    pthread_barrier_t *both;
    const cpu_set_t *here;
    uint64_t delay_ns; /* ready without a processor; UINT64_MAX: nobody counts it */
} contender;

static uint64_t
own_processor_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *
delay_main(void *arg)
{
    contender *c = arg;
    uint64_t before = spw_thread_run_delay_ns(), end;
    (void)sched_setaffinity(0, sizeof *c->here, c->here);
    (void)pthread_barrier_wait(c->both);
    end = own_processor_ns() + 100000000;
    while (own_processor_ns() < end) {
    }
    c->delay_ns = before == UINT64_MAX ? UINT64_MAX : spw_thread_run_delay_ns() - before;
    return NULL;
}

/* Two threads want 100 ms of one processor each: one is ready meanwhile without having it, however slow the machine. */
static void
test_run_delay(void **state)
{
    pthread_barrier_t both;
    contender two[2];
    cpu_set_t here;
    pthread_t threads[2];
    (void)state;
    CPU_ZERO(&here);
    CPU_SET((size_t)sched_getcpu(), &here);
    assert_int_equal(pthread_barrier_init(&both, NULL, 2), 0);
    for (int i = 0; i < 2; i++) {
        two[i] = (contender){.both = &both, .here = &here};
        assert_int_equal(pthread_create(&threads[i], NULL, delay_main, &two[i]), 0);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    pthread_barrier_destroy(&both);
    if (two[0].delay_ns == UINT64_MAX)
        skip(); /* a kernel that keeps no account of it */
    assert_true(two[0].delay_ns + two[1].delay_ns > 50000000);
}

/* Pieces of a memory against a map of its bytes: each lies in the lowest gap, what is refused fits nowhere, and no two gaps touch. */
static void
test_gaps(void **state)
{
    enum { BYTES = 300, OWNERS = 60, CALLS = 20000 };
    spw_gaps g;
    bool taken[BYTES] = {false};
    uint64_t at[OWNERS], bytes[OWNERS] = {0}, refused = 0;
    (void)state;
    assert_int_equal(spw_gaps_init(&g, BYTES, OWNERS, NULL), SPW_OK);
    for (uint32_t call = 0; call < CALLS; call++) {
        uint32_t r[4], owner;
        spw_philox(11, 0, call, r);
        owner = r[0] % OWNERS;
        if (bytes[owner] > 0) {
            spw_gaps_give_back(&g, at[owner], bytes[owner]);
            memset(taken + at[owner], false, bytes[owner]);
            bytes[owner] = 0;
        } else {
            uint64_t end = 0, run = 0, wanted = 1 + r[1] % (r[2] % 4 == 0 ? 40 : 8);
            bool there = spw_gaps_take(&g, wanted, &at[owner]);
            for (; end < BYTES && run < wanted; end++)
                run = taken[end] ? 0 : run + 1;
            assert_int_equal(there, run == wanted);
            assert_true(!there || at[owner] == end - wanted);
            memset(taken + end - run, true, there ? wanted : 0);
            bytes[owner] = there ? wanted : 0;
            refused += !there;
        }
        for (uint32_t i = 1; i < g.count; i++)
            assert_true(g.list[i - 1].offset + g.list[i - 1].bytes < g.list[i].offset);
    }
    assert_true(refused > 100 && refused < CALLS / 2);
    spw_gaps_deinit(&g);
}

/* Sets of numbers beside a map of them, of as many levels as one to three words of the lowest and more need. */
static void
test_set(void **state)
{
    static const uint64_t bounds[] = {1, 64, 65, 4096, 5000, 300000};
    static bool map[300000];
    (void)state;
    for (size_t b = 0; b < sizeof bounds / sizeof bounds[0]; b++) {
        const uint64_t bound = bounds[b];
        spw_set set;
        assert_int_equal(spw_set_init(&set, bound, NULL), SPW_OK);
        memset(map, 0, sizeof map);
        for (uint32_t call = 0; call < 4000; call++) {
            uint32_t r[4];
            uint64_t n, next, last;
            spw_philox(12, b, call, r);
            n = r[0] % bound;
            if (r[1] % 3 > 0)
                spw_set_add(&set, n);
            else
                spw_set_remove(&set, n);
            map[n] = r[1] % 3 > 0;
            if (call % 1000 == 999) {
                for (n = 0; n < bound; n++)
                    spw_set_remove(&set, n);
                memset(map, 0, sizeof map);
            }
            next = last = r[2] % (bound + 1);
            assert_true(last == bound || spw_set_has(&set, last) == map[last]);
            assert_true(spw_set_last(&set, UINT64_MAX) == spw_set_last(&set, bound));
            n = next;
            while (next < bound && !map[next])
                next++;
            assert_true(spw_set_next(&set, n) == (next < bound ? next : UINT64_MAX));
            while (last > 0 && !map[last - 1])
                last--;
            assert_true(spw_set_last(&set, n) == (last > 0 ? last - 1 : UINT64_MAX));
        }
        spw_set_deinit(&set);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_halves), cmocka_unit_test(test_convert),   cmocka_unit_test(test_convert_every_isa),
        cmocka_unit_test(test_philox), cmocka_unit_test(test_bytes),     cmocka_unit_test(test_errors),
        cmocka_unit_test(test_pool),   cmocka_unit_test(test_regions),   cmocka_unit_test(test_large_region),
        cmocka_unit_test(test_prompt), cmocka_unit_test(test_run_delay), cmocka_unit_test(test_gaps),
        cmocka_unit_test(test_set),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
