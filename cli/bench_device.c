/*
 * What spillway bench gemm and spillway bench attention share: how a device's operations are timed beside its peak, and shown.
 *
 * The peak is the device's own where it is known (its clock at its highest, so nothing reaches it); where not, a square product,
 * measured in turn with every row. Arrays hold a fixed pattern, so that the command that asks for a row can check samples of its result
 * against sums in fp64; that is not in the timing.
 */
#include "bench_device.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { REPS_MIN = 5 };

/* ---------------------------------------------------------------- memory */

void *
cli_device_take(device_bench *b, uint64_t bytes)
{
    void *p = NULL;
    SPW_ASSERT(b->array_count < BENCH_ARRAYS);
    if (b->err.status == SPW_OK && spw_gpu_alloc(b->gpu, &p, bytes, &b->err) == SPW_OK)
        b->arrays[b->array_count++] = p;
    return p;
}

void
cli_device_give_back(device_bench *b, uint32_t from)
{
    while (b->array_count > from)
        spw_gpu_free(b->gpu, b->arrays[--b->array_count]);
}

void *
cli_device_take_filled(device_bench *b, uint64_t elems, uint64_t shift)
{
    char *p = cli_device_take(b, elems * spw_dtype_bytes(b->type));
    for (uint64_t at = 0, n; p != NULL && at < elems; at += n) {
        uint64_t from = (at + shift) % BENCH_PATTERN;
        n = elems - at < BENCH_PATTERN - from ? elems - at : BENCH_PATTERN - from;
        spw_gpu_copy_h2d(b->queue, p + at * spw_dtype_bytes(b->type), b->type, b->pattern + from, SPW_F32, n);
    }
    return p;
}

static void
make_pattern(device_bench *b)
{
    for (uint64_t i = 0; i < BENCH_PATTERN; i++) { /* random: zeros would draw less power than work does */
        uint32_t r[4];
        spw_philox(3, 0, i, r);
        b->pattern[i] = spw_bf16_to_f32(spw_f32_to_bf16((2.0f * spw_uniform_f32(r[0]) - 1.0f) / 4));
    }
}

bool
cli_device_is_near(device_bench *b, const void *array, uint64_t i, double want, double scale)
{
    static const double rounding[SPW_DTYPE_COUNT] = {2e-5, 8e-3, 1e-3};
    float got;
    spw_gpu_copy_d2h(b->queue, &got, SPW_F32, (const char *)array + i * spw_dtype_bytes(b->type), b->type, 1, NULL);
    spw_gpu_queue_sync(b->queue);
    return fabs((double)got - want) <= rounding[b->type] * (fabs(want) + scale);
}

/* ---------------------------------------------------------------- timing */

static double
time_call(device_bench *b, device_work work, const device_row *r, uint32_t calls)
{
    uint64_t begin = spw_now_ns();
    for (uint32_t i = 0; i < calls; i++)
        work(b, r);
    spw_gpu_queue_sync(b->queue);
    return (double)(spw_now_ns() - begin) * 1e-9 / calls;
}

static void
square_product(device_bench *b, const device_row *r)
{
    uint64_t n = b->square_side;
    (void)r;
    spw_gpu_linear(b->queue, b->square[2], b->square[0], b->square[1], NULL, n, n, n, 0);
}

/* Several calls per sample where one is short, as many as take a millisecond. */
static void
measure(device_bench *b, device_row *r)
{
    static double ceiling[BENCH_REPS_MAX];
    double n = (double)b->square_side, first;
    uint64_t end = spw_now_ns() + (b->smoke ? 0 : (uint64_t)(b->seconds * 1e9));
    uint32_t calls, reps_min = b->smoke ? 1 : REPS_MIN;
    (void)time_call(b, r->work, r, 1); /* warm-up: algorithms are chosen, memory grows */
    first = time_call(b, r->work, r, 1);
    calls = b->smoke || first >= 1e-3 ? 1 : (uint32_t)(1e-3 / first) + 1;
    for (r->reps = 0; r->reps < BENCH_REPS_MAX && (r->reps < reps_min || spw_now_ns() < end); r->reps++) {
        if (b->square[0] != NULL)
            ceiling[r->reps] = time_call(b, square_product, NULL, 1);
        r->seconds[r->reps] = time_call(b, r->work, r, calls);
    }
    r->p50 = spw_median(r->seconds, r->reps);
    r->limit_flops_s =
        b->square[0] != NULL ? 2 * n * n * n / spw_median(ceiling, r->reps) : spw_gpu_get_info(b->gpu)->peak_flops;
}

/* ---------------------------------------------------------------- reports */

static void
print_json(device_bench *b, json_t *object)
{
    char command[32];
    snprintf(command, sizeof command, "bench %s", b->name);
    (void)cli_show_json(command, CLI_DIGITS_MEASURED, object, &b->err);
}

static void
print_header(device_bench *b)
{
    const spw_gpu_info *info = spw_gpu_get_info(b->gpu);
    bool products = strcmp(b->name, "gemm") == 0, known = b->square[0] == NULL;
    if (b->json) {
        print_json(b,
                   json_pack("{s:{s:s,s:i,s:s,s:s,s:s,s:s,s:s,s:s}}", "header", "bench", b->name, "schema", 1,
                             "version", SPW_VERSION, "device", info->name, "description", info->description, "compute",
                             spw_dtype_name(b->type), "build", cli_build_name(), "peak", known ? "device" : "square"));
        return;
    }
    printf("# bench %s  schema 1  spillway %s  device %s (%s)  build %s\n", b->name, SPW_VERSION, info->name,
           info->description, cli_build_name());
    if (known)
        printf("# peak: %.1f TFLOP/s of products in %s at the highest clock\n", info->peak_flops * 1e-12,
               spw_dtype_name(b->type));
    else
        printf("# peak: a product of %llu^3, in turn with each row\n", (unsigned long long)b->square_side);
    if (products && !info->fp8)
        printf("# no rows of fp8: they need compute capability 8.9, and bf16\n");
    printf(products
               ? "#   product                 M      N      K what       reps       p50   TFLOP/s  %%peak  #wrong\n"
               : "#   attention               B      T heads what       reps       p50   TFLOP/s  %%peak  #wrong\n");
    printf("#                                                             (us)\n");
}

static void
print_row(device_bench *b, const device_row *r)
{
    bool products = strcmp(b->name, "gemm") == 0;
    uint64_t d[3] = {products ? r->M : r->shape.B, products ? r->N : r->shape.T, products ? r->K : r->shape.Hq};
    double rate = r->flops / r->p50;
    if (b->json) {
        json_t *samples = json_array();
        for (uint32_t i = 0; i < r->reps; i++)
            json_array_append_new(samples, json_real(r->seconds[i] * 1e6)); /* a failure shows in json_pack */
        print_json(b, json_pack("{s:s,s:s,s:I,s:I,s:I,s:I,s:f,s:f,s:f,s:f,s:I,s:o}", "op", r->name, "what", r->what,
                                products ? "M" : "B", (json_int_t)d[0], products ? "N" : "T", (json_int_t)d[1],
                                products ? "K" : "heads", (json_int_t)d[2], "reps", (json_int_t)r->reps, "p50_us",
                                r->p50 * 1e6, "flop_s", rate, "peak_flop_s", r->limit_flops_s, "ratio_to_peak",
                                rate / r->limit_flops_s, "wrong", (json_int_t)r->wrong, "samples_us", samples));
        return;
    }
    printf("  %-20s %6llu %6llu %6llu %-8s %6u %9.1f %9.3f %6.0f %7llu\n", r->name, (unsigned long long)d[0],
           (unsigned long long)d[1], (unsigned long long)d[2], r->what, r->reps, r->p50 * 1e6, rate * 1e-12,
           100 * rate / r->limit_flops_s, (unsigned long long)r->wrong);
    fflush(stdout);
}

/* ---------------------------------------------------------------- a row */

uint64_t
cli_device_run_row(device_bench *b, device_row *r, const char *what, double flops, device_work work, device_check check)
{
    r->what = what;
    r->work = work;
    r->flops = flops;
    r->wrong = 0;
    if (b->err.status != SPW_OK)
        return 0;
    measure(b, r);
    if (check != NULL)
        check(b, r);
    (void)spw_gpu_check(b->gpu, &b->err);
    if (b->err.status == SPW_OK)
        print_row(b, r);
    return r->wrong;
}

/* ---------------------------------------------------------------- the command */

static void
bench_open(device_bench *b)
{
    spw_gpu_options options = {.name = b->device, .compute_dtype = b->dtype};
    make_pattern(b);
    if (spw_gpu_open(&b->gpu, &options, &b->err) != SPW_OK ||
        spw_gpu_queue_create(&b->queue, b->gpu, SPW_QUEUE_COMPUTE, &b->err) != SPW_OK)
        return;
    b->type = spw_gpu_get_info(b->gpu)->compute_dtype;
    if (spw_gpu_get_info(b->gpu)->peak_flops > 0)
        return;
    b->square_side = b->smoke ? 64 : 1024;
    b->square[0] = cli_device_take_filled(b, b->square_side * b->square_side, 0);
    b->square[1] = cli_device_take_filled(b, b->square_side * b->square_side, 77);
    b->square[2] = cli_device_take(b, b->square_side * b->square_side * spw_dtype_bytes(b->type));
}

static void
bench_close(device_bench *b)
{
    if (b->gpu == NULL)
        return;
    if (b->queue != NULL)
        spw_gpu_queue_sync(b->queue);
    cli_device_give_back(b, 0);
    spw_gpu_queue_destroy(b->queue);
    spw_gpu_close(b->gpu);
}

static int
parse_options(device_bench *b, const char *command, int argc, char **argv)
{
    static const char *const with_value[] = {"--device", "--compute", "--seconds", NULL};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value;
        if (strcmp(name, "--json") == 0) {
            b->json = true;
            continue;
        }
        if (strcmp(name, "--smoke") == 0) {
            b->smoke = true;
            continue;
        }
        if ((value = cli_known_value(command, with_value, argc, argv, &i)) == NULL)
            return EXIT_USAGE;
        if (strcmp(name, "--device") == 0) {
            b->device = value;
        } else if (strcmp(name, "--compute") == 0) {
            int t = 0;
            while (t < SPW_DTYPE_COUNT && strcmp(value, spw_dtype_name((spw_dtype)t)) != 0)
                t++;
            if (t == SPW_DTYPE_COUNT)
                return cli_usage(command, "--compute %s: fp32, bf16 or fp16", value);
            b->dtype = (spw_dtype)t;
        } else if (!cli_bench_seconds(command, value, &b->seconds)) {
            return EXIT_USAGE;
        }
    }
    return EXIT_DONE;
}

int
cli_device_run_bench(const char *name, uint64_t (*rows_fn)(device_bench *b), int argc, char **argv)
{
    static device_bench b; /* large */
    bool products = strcmp(name, "gemm") == 0;
    uint64_t wrong = 0;
    b = (device_bench){.name = name, .device = "auto", .dtype = SPW_BF16, .seconds = 0.5};
    if (parse_options(&b, products ? "bench gemm" : "bench attention", argc, argv) != EXIT_DONE)
        return EXIT_USAGE;
    bench_open(&b);
    if (b.err.status == SPW_OK)
        print_header(&b);
    if (b.err.status == SPW_OK)
        wrong = rows_fn(&b);
    bench_close(&b);
    if (b.err.status == SPW_OK && wrong > 0)
        (void)SPW_RAISE(&b.err, SPW_ECORRUPT, "bench %s: %llu samples of results are wrong", b.name,
                        (unsigned long long)wrong);
    return b.err.status == SPW_OK ? EXIT_DONE : cli_fail(&b.err);
}
