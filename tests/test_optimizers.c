/*
 * Optimizers and state formats: agreement with PyTorch, one truth on every instruction set and cut, what lossy formats
 * lose, an optimizer from outside. Random inputs come from Philox; SPW_SEED replays a run.
 */
#define SPW_EXAMPLE_AS_LIBRARY
#include "../examples/custom_optimizer.c"
#include "cpu_adam_internal.h"
#include "vectors/opt_vectors.h"
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

enum { ELEMS = 4096, RANGES_MAX = 8 };

/* One chunk in every format's room, with bytes around it that nobody may touch. */
typedef struct chunk {
    _Alignas(64) char weights[ELEMS * 4 + 64], record[ELEMS * 12 + 64], grad[ELEMS * 4];
} chunk;

static uint64_t seed = 20261121, draws;
static chunk a, b;
static const spw_optimizer *const optimizers[] = {&spw_opt_adam, &spw_opt_adagrad, &spw_opt_lion, &spw_opt_sgd,
                                                  &signum};
enum { OPTIMIZERS = sizeof optimizers / sizeof *optimizers };

static uint32_t
random_u32(void)
{
    uint32_t out[4];
    spw_philox(seed, 0, draws++, out);
    return out[0];
}

static uint32_t
random_below(uint32_t n)
{
    return (uint32_t)(((uint64_t)random_u32() * n) >> 32);
}

static spw_isa
draw_isa(void)
{
    spw_isa isa = SPW_ISA_COUNT;
    while (!spw_cpu_has(isa))
        isa = (spw_isa)random_below(SPW_ISA_COUNT);
    return isa;
}

static float
random_float(bool special)
{
    static const uint32_t corners[] = {0x00000000u, 0x80000000u, 0x00000001u, 0x807fffffu, 0x00800000u, 0x7f7fffffu,
                                       0xff7fffffu, 0x7f7f8000u, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u};
    uint32_t kind = special ? random_below(12) : 11;
    if (kind == 0)
        return spw_bits_f32(corners[random_below(sizeof corners / sizeof corners[0])]);
    if (kind == 1)
        return spw_bits_f32(random_u32());
    if (kind == 2)
        return spw_bits_f32(random_u32() & 0x807fffffu);
    return (spw_uniform_f32(random_u32()) - 0.5f) * ldexpf(1.0f, (int)random_below(24) - 20);
}

/* Box and Muller 1958. */
static double
normal(void)
{
    double u = (random_u32() + 1.0) * 0x1p-32, v = random_u32() * 0x1p-32;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

static spw_opt_hp
usual_hp(void)
{
    return (spw_opt_hp){.lr = 1e-2,
                        .weight_decay = 0.1,
                        .beta1 = 0.9,
                        .beta2 = 0.99,
                        .eps = 1e-8,
                        .decoupled = true,
                        .bias_correction = true,
                        .momentum = 0.9,
                        .step = 3,
                        .grad_scale = 0.5,
                        .seed = 9};
}

static spw_opt_coef
prepared(const spw_optimizer *o, const spw_opt_hp *hp)
{
    spw_opt_coef coef;
    spw_error err = {0};
    if (spw_opt_prepare(&coef, o, hp, &err) != SPW_OK)
        fail_msg("%s", err.message);
    return coef;
}

static void
fill(chunk *c, spw_state_format f, const spw_optimizer *o, spw_dtype grad_dtype, uint64_t n, bool special)
{
    bool tiny[ELEMS / SPW_STATE_GROUP]; /* all of this group is too small for a scale */
    memset(c, 0x5a, sizeof *c);
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t group = i / SPW_STATE_GROUP;
        float g;
        if (i % SPW_STATE_GROUP == 0)
            tiny[group] = special && random_below(8) == 0;
        g = tiny[group] ? random_float(false) * 0x1p-100f : random_float(special);
        if (grad_dtype == SPW_F32)
            ((float *)(void *)c->grad)[i] = g;
        else
            spw_convert((uint16_t *)(void *)c->grad + i, grad_dtype, &g, SPW_F32, 1);
    }
    memset(c->weights, 0, n * spw_state_weight_bytes(f));
    memset(c->record, 0, spw_state_record_bytes(f, o, n));
    for (int part = 0; part <= (int)o->moment_count; part++) {
        float x[ELEMS];
        for (uint64_t i = 0; i < n; i++) {
            x[i] = tiny[i / SPW_STATE_GROUP] ? random_float(false) * 0x1p-100f : random_float(special);
            if (part > 0 && o->moment_unsigned[part - 1])
                x[i] = fabsf(x[i]);
        }
        spw_state_set(f, o, c->weights, c->record, n, (spw_state_part)part, 0, n, x);
    }
}

static spw_opt_chunk
opt_chunk(chunk *c, spw_state_format f, spw_dtype grad_dtype, uint64_t n)
{
    return (spw_opt_chunk){.format = f,
                           .elems = n,
                           .weights = c->weights,
                           .record = c->record,
                           .grad = c->grad,
                           .grad_dtype = grad_dtype,
                           .first = 77 * SPW_STATE_GROUP};
}

/* Parameter groups at arbitrary places, with hyper-parameters of their own. */
static uint32_t
draw_ranges(spw_opt_range *ranges, spw_opt_coef *coefs, const spw_optimizer *o, uint64_t n)
{
    uint32_t count = 0;
    for (uint64_t at = 0; at < n; count++) {
        spw_opt_hp hp = usual_hp();
        hp.lr = 1e-3 * (1 + random_below(9));
        hp.weight_decay = random_below(2) * 0.1;
        hp.decoupled = random_below(2);
        hp.nearest = n / SPW_STATE_GROUP % 2 == 1; /* one for the whole step */
        coefs[count] = prepared(o, &hp);
        at += count + 1 == RANGES_MAX ? n : 1 + random_below((uint32_t)n);
        ranges[count] = (spw_opt_range){at < n ? at : n, &coefs[count]};
    }
    return count;
}

static void
test_isa_identity(void **state)
{
    /* Every optimizer, format and gradient type gives the same bytes on every instruction set, for ordinary numbers,
     * denormals, huge ones, zeros, infinities and NaN, with parameter groups anywhere; and counts the same nonfinite. */
    static const uint64_t sizes[] = {64, 192, 512, 576, 1024, 4096};
    uint32_t compared = 0;
    (void)state;
    for (int o = 0; o < OPTIMIZERS; o++)
        for (int f = 0; f < SPW_STATE_COUNT; f++)
            for (int dtype = 0; dtype < 3; dtype++)
                for (uint32_t round = 0; round < 12; round++) {
                    static const spw_dtype dtypes[] = {SPW_F32, SPW_BF16, SPW_F16};
                    uint64_t n = sizes[round % 6], bad_ref = 0;
                    spw_opt_range ranges[RANGES_MAX];
                    spw_opt_coef coefs[RANGES_MAX];
                    uint32_t count = draw_ranges(ranges, coefs, optimizers[o], n);
                    static chunk start;
                    spw_opt_chunk x = opt_chunk(&a, (spw_state_format)f, dtypes[dtype], n),
                                  y = opt_chunk(&b, (spw_state_format)f, dtypes[dtype], n);
                    fill(&start, x.format, optimizers[o], x.grad_dtype, n, round >= 6);
                    a = start;
                    assert_int_equal(spw_opt_step_isa(SPW_ISA_SCALAR, &x, ranges, count, &bad_ref), SPW_OK);
                    for (int isa = SPW_ISA_SCALAR + 1; isa < SPW_ISA_COUNT; isa++) {
                        uint64_t bad = 0;
                        b = start;
                        if (!spw_cpu_has((spw_isa)isa))
                            continue;
                        assert_int_equal(spw_opt_step_isa((spw_isa)isa, &y, ranges, count, &bad), SPW_OK);
                        compared++;
                        if (memcmp(&a, &b, sizeof a) != 0 || bad != bad_ref)
                            fail_msg("%s %s gradients %d n %d isa %s seed %llu draw %llu", optimizers[o]->name,
                                     spw_state_name((spw_state_format)f), dtype, (int)n, spw_isa_name((spw_isa)isa),
                                     (unsigned long long)seed, (unsigned long long)draws);
                    }
                }
    assert_true(compared > 0 || spw_cpu_isa_native() == SPW_ISA_SCALAR);
}

static void
draw_gradient(chunk *c, spw_dtype dtype, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float g = (spw_uniform_f32(random_u32()) - 0.5f) * ldexpf(1.0f, -(int)(i / 100 % 9));
        spw_convert(c->grad + i * spw_dtype_bytes(dtype), dtype, &g, SPW_F32, 1);
    }
}

/* About as many elements as a list has room for are anything; gradients of as many others are up to 256 times as large. */
static void
strew(chunk *c, spw_state_format f, const spw_optimizer *o, spw_dtype grad_dtype, uint64_t n)
{
    const uint64_t grad_bytes = spw_dtype_bytes(grad_dtype);
    for (uint32_t k = random_below((uint32_t)(n / SPW_STATE_GROUP) + 2); k > 0; k--) {
        const uint64_t at = random_below((uint32_t)n), other = random_below((uint32_t)n);
        const uint32_t part = random_below(o->moment_count + 2);
        float x = random_float(true), g;
        if (part <= o->moment_count)
            spw_state_set(f, o, c->weights, c->record, n, (spw_state_part)part, at, 1,
                          &(float){part > 0 && o->moment_unsigned[part - 1] ? fabsf(x) : x});
        else
            spw_convert(c->grad + at * grad_bytes, grad_dtype, &x, SPW_F32, 1);
        spw_convert(&g, SPW_F32, c->grad + other * grad_bytes, grad_dtype, 1);
        g = ldexpf(g, (int)random_below(9));
        spw_convert(c->grad + other * grad_bytes, grad_dtype, &g, SPW_F32, 1);
    }
}

/* A log of just the bytes it takes, between bytes that nobody may touch. */
typedef struct tight_log {
    _Alignas(64) char bytes[64 + ELEMS * 16 + 64];
} tight_log;

static void
check_around(const tight_log *log, uint64_t bytes)
{
    for (uint64_t i = 0; i < 64; i++)
        assert_true(log->bytes[i] == 0x33 && log->bytes[64 + bytes + i] == 0x33);
}

/*
 * Taken back, an update leaves no trace, whichever instruction set did it and whichever takes it back, in whatever pieces; while it
 * stands it is the update in place. Where the log has no room, which few-element chunks and numbers that are no training's bring about,
 * the piece is as before. Of a record alone the weights stay as the update left them.
 */
static void
test_undo(void **state)
{
    static const uint64_t sizes[] = {64, 192, 576, 1024, 4096};
    static chunk start, want, before;
    static tight_log log;
    uint32_t stood = 0, backwards = 0, no_room = 0;
    (void)state;
    for (int o = 0; o < OPTIMIZERS; o++)
        for (int f = 0; f < SPW_STATE_COUNT; f++)
            for (uint32_t round = 0; round < 80; round++) {
                const uint64_t n = sizes[round % 5], group = SPW_STATE_GROUP;
                const bool special = round % 4 == 3, late = round % 8 >= 5, strewn = round % 8 % 3 == 2,
                           weights = round % 7 < 5, adam = o == 0 && f <= SPW_STATE_SPLIT && weights;
                const uint64_t log_bytes = n / 32 * spw_opt_log_bytes_32((spw_state_format)f, optimizers[o], weights);
                const spw_isa forth = draw_isa(), back = draw_isa();
                spw_opt_range ranges[RANGES_MAX];
                spw_opt_coef coefs[RANGES_MAX];
                uint32_t count = draw_ranges(ranges, coefs, optimizers[o], n);
                spw_opt_chunk x = opt_chunk(&a, (spw_state_format)f, round % 2 == 0 ? SPW_F32 : SPW_BF16, n),
                              y = opt_chunk(&b, (spw_state_format)f, x.grad_dtype, n);
                uint64_t cuts[3] = {group * random_below((uint32_t)(n / group)), n, n}, bad = 0, done = 0;
                assert_int_equal(log_bytes, adam ? n * 9 / 4
                                                 : spw_state_record_bytes(x.format, optimizers[o], n) +
                                                       weights * n * spw_state_weight_bytes(x.format));
                fill(&start, x.format, optimizers[o], x.grad_dtype, n, special);
                if (round % 3 == 0) { /* from nothing, as a training */
                    float zero[ELEMS] = {0};
                    for (int part = 1; part <= (int)optimizers[o]->moment_count; part++)
                        spw_state_set(x.format, optimizers[o], start.weights, start.record, n, (spw_state_part)part, 0,
                                      n, zero);
                }
                b = start;
                for (int t = 0; t < 24 && !special; t++) {
                    draw_gradient(&b, x.grad_dtype, n);
                    spw_opt_step(&y, ranges, count);
                }
                if (strewn)
                    strew(&b, x.format, optimizers[o], x.grad_dtype, n);
                if (late) { /* the list is full near the end: masters that are nothing beside their step */
                    float nothing[ELEMS];
                    for (int i = 0; i < ELEMS; i++)
                        nothing[i] = 1e-30f;
                    spw_state_set(x.format, optimizers[o], b.weights, b.record, n, SPW_PART_MASTER, n - n / 32, n / 32,
                                  nothing);
                }
                a = start = want = b;
                y = opt_chunk(&want, x.format, x.grad_dtype, n);
                spw_opt_step(&y, ranges, count);
                memset(&log, 0x33, sizeof log);
                x.log = log.bytes + 64;
                x.log_weights = weights;
                for (int k = 0; k < 2 && bad != SPW_OPT_NO_ROOM; k++) {
                    before = a;
                    x.begin = done;
                    x.end = cuts[k];
                    if (x.begin == x.end)
                        continue;
                    assert_int_equal(spw_opt_step_isa(forth, &x, ranges, count, &bad), SPW_OK);
                    if (bad == SPW_OPT_NO_ROOM) {
                        no_room++;
                        assert_memory_equal(&a, &before, sizeof a);
                    } else {
                        done = x.end;
                    }
                }
                check_around(&log, log_bytes);
                assert_true(adam || bad != SPW_OPT_NO_ROOM);
                if (done == n && !special && !strewn)
                    assert_memory_equal(&a, &want, sizeof a);
                stood += done == n;
                backwards += done == n && adam && !special;
                if (!weights)
                    x.weights = NULL;
                for (int k = 1; k >= 0; k--) { /* the last piece first */
                    x.begin = k == 0 ? 0 : cuts[0];
                    x.end = k == 0 ? cuts[0] : n;
                    if (x.end <= done && x.begin < x.end)
                        assert_int_equal(spw_opt_undo_isa(back, &x, ranges, count), SPW_OK);
                }
                if (!weights)
                    memcpy(start.weights, a.weights, sizeof a.weights);
                if (memcmp(&a, &start, sizeof a) != 0)
                    fail_msg("%s %s n %d round %u seed %llu", optimizers[o]->name, spw_state_name((spw_state_format)f),
                             (int)n, round, (unsigned long long)seed);
            }
    assert_true(stood > no_room && no_room > 0 && backwards > 15);
}

/*
 * What of a training does not run backwards: gradients that are normal and vary by a factor of e^0.5 beside, masters of 0.02, from nothing
 * on. The list of a log holds one in 64.
 */
static void
test_misfits(void **state)
{
    enum { CHUNKS = 16, STEPS = 60 };
    uint64_t misfits[STEPS + 1] = {0};
    static tight_log log;
    (void)state;
    for (int round = 0; round < CHUNKS; round++) {
        spw_opt_hp hp = usual_hp();
        spw_opt_chunk x = opt_chunk(&a, SPW_STATE_SPLIT, SPW_F32, ELEMS);
        float zero[ELEMS] = {0}, w[ELEMS];
        memset(a.record, 0, sizeof a.record);
        for (int i = 0; i < ELEMS; i++)
            w[i] = 0.02f * (float)normal();
        spw_state_set(x.format, &spw_opt_adam, a.weights, a.record, ELEMS, SPW_PART_MASTER, 0, ELEMS, w);
        for (int part = SPW_PART_EXP_AVG; part <= SPW_PART_EXP_AVG_SQ; part++)
            spw_state_set(x.format, &spw_opt_adam, a.weights, a.record, ELEMS, (spw_state_part)part, 0, ELEMS, zero);
        hp.lr = 1e-4;
        hp.beta2 = 0.95;
        hp.grad_scale = 1;
        x.log_weights = true;
        for (hp.step = 1; hp.step <= STEPS; hp.step++) {
            spw_opt_coef coef = prepared(&spw_opt_adam, &hp);
            const spw_opt_range range = {ELEMS, &coef};
            for (int i = 0; i < ELEMS; i++)
                ((float *)(void *)a.grad)[i] = 1e-3f * (float)(normal() * exp(0.5 * normal()));
            for (uint64_t at = 0; at < ELEMS; at += SPW_STATE_GROUP) { /* its room is the chunk's, 63 */
                spw_opt_chunk probe = x;
                probe.log = log.bytes;
                probe.begin = at;
                probe.end = at + SPW_STATE_GROUP;
                *(uint32_t *)(void *)log.bytes = 0; /* the list's count */
                b = a;
                probe.weights = b.weights;
                probe.record = b.record;
                misfits[hp.step] += spw_opt_step(&probe, &range, 1) == SPW_OPT_NO_ROOM ? SPW_STATE_GROUP
                                                                                       : *(uint32_t *)(void *)log.bytes;
            }
            spw_opt_step(&x, &range, 1);
        }
    }
    printf("# does not run backwards: %.1f %% in step 2, %.2f %% in step 5, %.2f %% in step 10, %.2f %% in step %d\n",
           100.0 * (double)misfits[2] / CHUNKS / ELEMS, 100.0 * (double)misfits[5] / CHUNKS / ELEMS,
           100.0 * (double)misfits[10] / CHUNKS / ELEMS, 100.0 * (double)misfits[STEPS] / CHUNKS / ELEMS, STEPS);
    for (int t = 10; t <= STEPS; t++)
        assert_true(misfits[t] < CHUNKS * ELEMS / SPW_STATE_GROUP / 4);
}

static void
test_cuts(void **state)
{
    /* A chunk updated whole and in parts, wherever it is cut, gives the same state: every optimizer and format. */
    (void)state;
    for (int o = 0; o < OPTIMIZERS; o++)
        for (int f = 0; f < SPW_STATE_COUNT; f++) {
            const spw_optimizer *opt = optimizers[o];
            spw_opt_hp hp = usual_hp();
            spw_opt_coef coef = prepared(opt, &hp);
            spw_opt_chunk whole = opt_chunk(&a, (spw_state_format)f, SPW_F32, ELEMS);
            uint64_t cut = SPW_STATE_GROUP * (1 + random_below(ELEMS / SPW_STATE_GROUP - 1));
            static float want[3][ELEMS], got[3][ELEMS];
            fill(&a, whole.format, opt, SPW_F32, ELEMS, false);
            for (int part = 0; part <= (int)opt->moment_count; part++)
                spw_state_get(whole.format, opt, a.weights, a.record, ELEMS, (spw_state_part)part, 0, ELEMS,
                              want[part]);
            for (int half = 0; half < 2; half++) { /* the same state in two chunks, through a buffer */
                uint64_t first = half ? cut : 0, n = half ? ELEMS - cut : cut;
                spw_opt_chunk piece = {.format = whole.format,
                                       .elems = n,
                                       .weights = b.weights,
                                       .record = b.record,
                                       .grad = (float *)(void *)a.grad + first,
                                       .grad_dtype = SPW_F32,
                                       .first = whole.first + first};
                for (int part = 0; part <= (int)opt->moment_count; part++)
                    spw_state_set(whole.format, opt, b.weights, b.record, n, (spw_state_part)part, 0, n,
                                  want[part] + first);
                spw_opt_step(&piece, &(spw_opt_range){n, &coef}, 1);
                for (int part = 0; part <= (int)opt->moment_count; part++)
                    spw_state_get(whole.format, opt, b.weights, b.record, n, (spw_state_part)part, 0, n,
                                  got[part] + first);
            }
            spw_opt_step(&whole, &(spw_opt_range){ELEMS, &coef}, 1);
            for (int part = 0; part <= (int)opt->moment_count; part++) {
                spw_state_get(whole.format, opt, a.weights, a.record, ELEMS, (spw_state_part)part, 0, ELEMS,
                              want[part]);
                assert_memory_equal(want[part], got[part], sizeof want[part]);
            }
        }
}

static void
test_pieces(void **state)
{
    /* A chunk updated in one call and piece by piece, with groups of parameters anywhere, gives the same bytes and the same
     * count of bad gradients, also for numbers that are not ordinary. */
    (void)state;
    for (int o = 0; o < OPTIMIZERS; o++)
        for (int f = 0; f < SPW_STATE_COUNT; f++)
            for (int round = 0; round < 4; round++) {
                spw_opt_range ranges[RANGES_MAX];
                spw_opt_coef coefs[RANGES_MAX];
                uint32_t count = draw_ranges(ranges, coefs, optimizers[o], ELEMS);
                spw_opt_chunk x = opt_chunk(&a, (spw_state_format)f, SPW_F32, ELEMS),
                              y = opt_chunk(&b, (spw_state_format)f, SPW_F32, ELEMS);
                uint64_t bad = 0;
                fill(&a, x.format, optimizers[o], SPW_F32, ELEMS, round % 2);
                b = a;
                for (uint64_t at = 0; at < ELEMS; at = y.end) {
                    y.begin = at;
                    y.end = at + SPW_STATE_GROUP * (1 + random_below(20));
                    y.end = y.end < ELEMS ? y.end : ELEMS;
                    bad += spw_opt_step(&y, ranges, count);
                }
                assert_int_equal(spw_opt_step(&x, ranges, count), bad);
                assert_memory_equal(&a, &b, sizeof a);
            }
}

static void
test_fused_equals_blocks(void **state)
{
    /* Fused kernels of every rule and the block path compute the same bits; those of Adam are kept from NaN, of which they leave the
     * architecture's. */
    static const spw_optimizer *const ours[] = {&spw_opt_adam, &spw_opt_adagrad, &spw_opt_lion, &spw_opt_sgd};
    (void)state;
    for (size_t o = 0; o < sizeof ours / sizeof *ours; o++)
        for (int f = 0; f < SPW_STATE_COUNT; f++)
            for (uint32_t round = 0; round < 12; round++) {
                spw_optimizer blocks = *ours[o]; /* another address: not recognised as one with fused kernels */
                spw_opt_hp hp = usual_hp();
                spw_isa isa = draw_isa();
                spw_opt_coef fused, block;
                spw_dtype dtype = (spw_dtype)(round % SPW_DTYPE_COUNT);
                uint64_t bad[2] = {0, 0};
                hp.decoupled = round % 2;
                hp.nesterov = round % 4 < 2;
                hp.dampening = hp.nesterov ? 0 : 0.25;
                hp.weight_decay = round % 3 ? 0.1 : 0;
                fused = prepared(ours[o], &hp);
                block = prepared(&blocks, &hp);
                spw_opt_chunk x = opt_chunk(&a, (spw_state_format)f, dtype, ELEMS),
                              y = opt_chunk(&b, (spw_state_format)f, dtype, ELEMS);
                fill(&a, x.format, ours[o], dtype, ELEMS, round >= 6 && (o > 0 || f > SPW_STATE_SPLIT));
                b = a;
                (void)spw_opt_step_isa(isa, &x, &(spw_opt_range){ELEMS, &fused}, 1, &bad[0]);
                (void)spw_opt_step_isa(isa, &y, &(spw_opt_range){ELEMS, &block}, 1, &bad[1]);
                assert_int_equal(bad[0], bad[1]);
                assert_memory_equal(&a, &b, sizeof a);
            }
}

static void
test_agrees_with_pytorch(void **state)
{
    /* 100 steps against PyTorch in float64: every weight within the bound that 100 roundings of fp32 allow, and not
     * further from it than twice PyTorch's own float32 run (plus an ulp). */
    double worst = 0;
    (void)state;
    for (size_t k = 0; k < sizeof opt_vectors / sizeof *opt_vectors; k++) {
        const opt_vector *v = &opt_vectors[k];
        const spw_optimizer *o = spw_optimizer_find(v->type);
        enum { N = SPW_STATE_GROUP };
        float w[N] = {0}, record[2 * N] = {0}, g[N] = {0};
        spw_opt_chunk c = {.format = SPW_STATE_FP32, .elems = N, .weights = w, .record = record, .grad = g};
        double own = 0, theirs = 0;
        assert_non_null(o);
        for (int i = 0; i < OPT_VECTOR_N; i++)
            w[i] = (float)sin(i + 1);
        for (int t = 1; t <= OPT_VECTOR_STEPS; t++) {
            spw_opt_hp hp = {.lr = v->lr,
                             .weight_decay = v->weight_decay,
                             .beta1 = v->beta1,
                             .beta2 = v->beta2,
                             .eps = v->eps,
                             .decoupled = strcmp(v->type, "AdamW") == 0,
                             .bias_correction = true,
                             .momentum = v->momentum,
                             .dampening = v->dampening,
                             .nesterov = v->nesterov,
                             .lr_decay = v->lr_decay,
                             .step = (uint64_t)t,
                             .grad_scale = 1};
            spw_opt_coef coef = prepared(o, &hp);
            for (int i = 0; i < OPT_VECTOR_N; i++)
                g[i] = (float)(sin(0.7 * i + 1.3 * t) * pow(10.0, i % 5 - 3));
            spw_opt_step(&c, &(spw_opt_range){N, &coef}, 1);
        }
        for (int i = 0; i < OPT_VECTOR_N; i++) {
            double ulp = ldexp(1, ilogb(fmax(fabs(v->w64[i]), 1e-3)) - 23);
            own = fmax(own, fabs(w[i] - v->w64[i]) / ulp);
            theirs = fmax(theirs, fabs(v->w32[i] - v->w64[i]) / ulp);
        }
        for (int m = 0; m < v->moment_count; m++)
            for (int i = 0; i < OPT_VECTOR_N; i++) {
                double want = v->m64[m][i], scale = fmax(fabs(want), pow(10.0, (i % 5 - 3) * (m + 1)) * 1e-2);
                assert_true(fabs(record[m * N + i] - want) <= 2e-5 * scale);
            }
        print_message("# %-14s %5.1f ulp from float64 (PyTorch's float32: %.1f)\n", v->name, own, theirs);
        assert_true(own <= 2 * theirs + 1);
        worst = fmax(worst, own);
    }
    assert_true(worst < 400);
}

/* As in PyTorch: without momentum there is nothing that is dampened. */
static void
test_dampening_alone(void **state)
{
    enum { N = SPW_STATE_GROUP };
    float w[N] = {0}, record[2 * N] = {0}, g[N];
    spw_opt_chunk c = {.format = SPW_STATE_FP32, .elems = N, .weights = w, .record = record, .grad = g};
    (void)state;
    for (int i = 0; i < N; i++)
        g[i] = 1;
    for (uint64_t t = 1; t <= 3; t++) {
        spw_opt_hp hp = {.lr = 0.5, .dampening = 0.25, .step = t, .grad_scale = 1};
        spw_opt_coef coef = prepared(&spw_opt_sgd, &hp);
        spw_opt_step(&c, &(spw_opt_range){N, &coef}, 1);
    }
    assert_true(w[0] == -1.5f && w[N - 1] == -1.5f);
}

static void
test_code_bounds(void **state)
{
    /* 8-bit moments: every element within the error that opt_block.h states, a signed zero stays zero, nothing is zero in
     * an unsigned group unless all is, and what was decoded encodes to the same bytes. */
    const spw__opt_table *t = &spw__opt_table_ref;
    (void)state;
    for (uint32_t round = 0; round < 2000; round++) {
        enum { N = SPW_STATE_GROUP };
        float x[N], y[N];
        int8_t code[N], again[N];
        uint16_t scale, scale_again;
        bool positive = round % 2;
        double top = 0, s;
        for (int i = 0; i < N; i++) {
            x[i] = random_below(8) == 0 ? 0.0f : random_float(false) * ldexpf(1, (int)random_below(40) - 30);
            if (positive)
                x[i] = fabsf(x[i]);
            top = fmax(top, fabs(x[i]));
        }
        if (positive) {
            t->store_uint8((uint8_t *)code, &scale, x, N, NULL);
            t->load_uint8(y, (uint8_t *)code, &scale, N);
            t->store_uint8((uint8_t *)again, &scale_again, y, N, NULL);
        } else {
            t->store_int8(code, &scale, x, N, NULL);
            t->load_int8(y, code, &scale, N);
            t->store_int8(again, &scale_again, y, N, NULL);
        }
        s = spw_bits_f32((uint32_t)scale << 16) * (positive ? 63487.0 : 247.0);
        assert_true(top < 0x1p-90 ? s == 0 : fabs(s - top) <= top / 255);
        for (int i = 0; i < N && s > 0; i++) {
            double error = fabs(x[i]) / 32 + top / (positive ? 2031584.0 : 7904.0);
            if (positive)
                error = fmax(error, top / 1.0e6 - x[i]); /* code 1 at least */
            assert_true(fabs((double)y[i] - x[i]) <= error * 1.005);
            assert_true(positive ? y[i] > 0 : x[i] != 0 || y[i] == 0);
            assert_true(y[i] == 0 || signbit(y[i]) == signbit(x[i]));
        }
        for (int i = 0; i < N; i++) /* minus zero reads as zero */
            assert_true(code[i] == again[i] || (!positive && code[i] == INT8_MIN && again[i] == 0));
        assert_int_equal(scale, scale_again);
    }
}

static void
test_stochastic_rounding(void **state)
{
    /* The mean over many keys is the number itself, each result is one of its two neighbours, and a key fixes it. */
    enum { KEYS = 20000 };
    (void)state;
    for (int k = 0; k < 20; k++) {
        float x[1] = {random_float(false)};
        uint16_t y, again;
        double sum = 0, spacing = ldexp(1, ilogb(fabs(x[0])) - 7), sigma = spacing / 2 / sqrt(KEYS);
        if (fabsf(x[0]) < 1e-30f)
            continue;
        for (uint32_t key = 0; key < KEYS; key++) {
            spw__opt_table_ref.store_bf16_stochastic(&y, x, 1, key * 2654435761u, 5);
            spw__opt_table_ref.store_bf16_stochastic(&again, x, 1, key * 2654435761u, 5);
            assert_int_equal(y, again);
            assert_true(fabs(spw_bf16_to_f32(y) - x[0]) < spacing);
            sum += spw_bf16_to_f32(y);
        }
        assert_true(fabs(sum / KEYS - x[0]) < 6 * sigma);
    }
}

static void
test_lossy_moments_decay(void **state)
{
    /* Without gradients moments shrink by beta per step, in 1000 steps by far more than what they round to: they follow
     * in every lossy format, on average over the elements. Scales rounded to nearest would hold them where they are. */
    (void)state;
    for (int f = SPW_STATE_SPLIT_BF16; f < SPW_STATE_COUNT; f++) {
        spw_opt_chunk c = opt_chunk(&a, (spw_state_format)f, SPW_F32, ELEMS);
        spw_opt_hp hp = usual_hp();
        static float x[ELEMS];
        double before = 0, after = 0;
        hp.lr = 0;
        hp.beta2 = 0.999;
        memset(&a, 0, sizeof a);
        for (int i = 0; i < ELEMS; i++)
            x[i] = random_float(false) * random_float(false);
        for (int i = 0; i < ELEMS; i++)
            x[i] = fabsf(x[i]);
        spw_state_set(c.format, &spw_opt_adam, a.weights, a.record, ELEMS, SPW_PART_EXP_AVG_SQ, 0, ELEMS, x);
        for (int i = 0; i < ELEMS; i++)
            before += x[i];
        for (hp.step = 1; hp.step <= 1000; hp.step++) {
            spw_opt_coef coef = prepared(&spw_opt_adam, &hp);
            spw_opt_step(&c, &(spw_opt_range){ELEMS, &coef}, 1);
        }
        spw_state_get(c.format, &spw_opt_adam, a.weights, a.record, ELEMS, SPW_PART_EXP_AVG_SQ, 0, ELEMS, x);
        for (int i = 0; i < ELEMS; i++)
            after += x[i];
        printf("# %-13s second moments after 1000 steps without a gradient: %.3f of 0.368\n",
               spw_state_name((spw_state_format)f), after / before);
        assert_true(fabs(after / before - pow(0.999, 1000)) < 0.03);
    }
}

static void
test_nearest_rounding(void **state)
{
    /* bf16 moments rounded to nearest are what fp32's update gives, rounded once; stochastic ones are a neighbour. */
    (void)state;
    for (int nearest = 0; nearest < 2; nearest++) {
        spw_opt_hp hp = usual_hp();
        spw_opt_coef coef;
        static float start[3][ELEMS], want[ELEMS], got[ELEMS];
        spw_opt_chunk lossy = opt_chunk(&a, SPW_STATE_SPLIT_BF16, SPW_F32, ELEMS),
                      exact = opt_chunk(&b, SPW_STATE_SPLIT, SPW_F32, ELEMS);
        uint32_t off = 0;
        hp.nearest = nearest;
        coef = prepared(&spw_opt_adam, &hp);
        fill(&a, lossy.format, &spw_opt_adam, SPW_F32, ELEMS, false);
        b = a; /* the gradient */
        for (int part = 0; part < 3; part++) {
            spw_state_get(lossy.format, &spw_opt_adam, a.weights, a.record, ELEMS, (spw_state_part)part, 0, ELEMS,
                          start[part]);
            spw_state_set(exact.format, &spw_opt_adam, b.weights, b.record, ELEMS, (spw_state_part)part, 0, ELEMS,
                          start[part]);
        }
        spw_opt_step(&lossy, &(spw_opt_range){ELEMS, &coef}, 1);
        spw_opt_step(&exact, &(spw_opt_range){ELEMS, &coef}, 1);
        for (int part = 1; part < 3; part++) {
            spw_state_get(lossy.format, &spw_opt_adam, a.weights, a.record, ELEMS, (spw_state_part)part, 0, ELEMS, got);
            spw_state_get(exact.format, &spw_opt_adam, b.weights, b.record, ELEMS, (spw_state_part)part, 0, ELEMS,
                          want);
            for (int i = 0; i < ELEMS; i++) {
                float rounded = spw_bits_f32((spw_f32_bits(want[i]) + 0x8000u) & 0xffff0000u); /* ties away */
                off += got[i] != rounded;
                assert_true(fabsf(got[i] - want[i]) <= ldexpf(fabsf(want[i]), -7));
            }
        }
        assert_true(nearest ? off == 0 : off > ELEMS / 4);
    }
}

static void
test_split_formats_keep_the_master(void **state)
{
    /* split-bf16 and split-int8 keep the master exactly; split24 within 2^-16 of it, relative. */
    static float w[ELEMS], back[ELEMS];
    (void)state;
    for (int f = SPW_STATE_SPLIT_BF16; f < SPW_STATE_COUNT; f++) {
        for (int i = 0; i < ELEMS; i++)
            w[i] = random_float(false);
        spw_state_set((spw_state_format)f, &spw_opt_adam, a.weights, a.record, ELEMS, SPW_PART_MASTER, 0, ELEMS, w);
        spw_state_get((spw_state_format)f, &spw_opt_adam, a.weights, a.record, ELEMS, SPW_PART_MASTER, 0, ELEMS, back);
        for (int i = 0; i < ELEMS; i++) {
            if (f == SPW_STATE_SPLIT24_INT8)
                assert_true(fabsf(back[i] - w[i]) <= ldexpf(fabsf(w[i]), -15));
            else
                assert_memory_equal(&back[i], &w[i], 4);
        }
    }
}

static void
test_refused(void **state)
{
    /* Bad hyper-parameters are refused by name before anything changes; so are optimizers that are incomplete. */
    const double nan = NAN;
    struct {
        const spw_optimizer *o;
        const char *word;
        spw_opt_hp hp;
    } cases[32];
    int n = 0;
    spw_error err = {0};
    (void)state;
#define BAD(optimizer, name, field, value)                                                                             \
    (cases[n].o = optimizer, cases[n].word = name, cases[n].hp = usual_hp(), cases[n].hp.field = value, n++)
    BAD(&spw_opt_adam, "lr", lr, nan);
    BAD(&spw_opt_sgd, "lr", lr, -1);
    BAD(&spw_opt_lion, "lr", lr, INFINITY);
    BAD(&spw_opt_lion, "beta1", beta1, 1);
    BAD(&spw_opt_lion, "beta2", beta2, -0.1);
    BAD(&spw_opt_adam, "beta2", beta2, 1);
    BAD(&spw_opt_adam, "eps", eps, 0);
    BAD(&spw_opt_adagrad, "eps", eps, 0);
    BAD(&spw_opt_adagrad, "lr_decay", lr_decay, nan);
    BAD(&spw_opt_sgd, "momentum", momentum, -1);
    BAD(&spw_opt_sgd, "dampening", dampening, nan);
    BAD(&spw_opt_adagrad, "weight_decay", weight_decay, nan);
    BAD(&spw_opt_adagrad, "step", step, 0);
    BAD(&spw_opt_sgd, "grad_scale", grad_scale, nan);
    BAD(&signum, "momentum", momentum, 1);
    for (int i = 0; i < n; i++) {
        spw_opt_coef coef, before;
        memset(&coef, 0x33, sizeof coef);
        before = coef;
        err = (spw_error){0};
        assert_int_equal(spw_opt_prepare(&coef, cases[i].o, &cases[i].hp, &err), SPW_EINVAL);
        assert_non_null(strstr(err.message, cases[i].word));
        assert_non_null(strstr(err.message, cases[i].o->name));
        assert_memory_equal(&coef, &before, sizeof coef);
    }
    spw_opt_hp hp = usual_hp();
    hp.nesterov = true;
    hp.momentum = 0;
    spw_opt_coef coef;
    assert_int_equal(spw_opt_prepare(&coef, &spw_opt_sgd, &hp, &err), SPW_EINVAL);
    assert_int_equal(spw_optimizer_register(&(spw_optimizer){.name = "x", .prepare = prepare}, &err), SPW_EINVAL);
    assert_int_equal(spw_optimizer_register(&spw_opt_adam, &err), SPW_EINVAL);
    static const char *const moments[][2] = {
        {"master", "a"}, {"a", "master"}, {"weight", "a"}, {"a", "weight"},
        {"grad", "a"},   {"a", "grad"},   {"a", "a"},      {"a", ""},
    };
    for (size_t i = 0; i < sizeof moments / sizeof *moments; i++) { /* checkpoints would have two tensors of a name */
        spw_optimizer o = signum;
        o.moment_count = 2;
        o.moment_names[0] = moments[i][0];
        o.moment_names[1] = moments[i][1];
        err = (spw_error){0};
        assert_int_equal(spw_optimizer_register(&o, &err), SPW_EINVAL);
        assert_non_null(strstr(err.message, "moment"));
    }
    assert_null(spw_optimizer_find("Signum"));
    assert_int_equal(spw_optimizer_register(&signum, &err), SPW_OK);
    assert_int_equal(spw_optimizer_register(&signum, &err), SPW_EINVAL);
    assert_ptr_equal(spw_optimizer_find("signum"), &signum);
    assert_ptr_equal(spw_optimizer_find("adamw"), &spw_opt_adam);
}

static void
test_learns(void **state)
{
    /* Every optimizer in every format lowers a quadratic by a factor of ten or more. */
    (void)state;
    for (int o = 0; o < OPTIMIZERS; o++)
        for (int f = 0; f < SPW_STATE_COUNT; f++) {
            static float w[ELEMS];
            double begin = 0, end = 0;
            spw_opt_chunk c = opt_chunk(&a, (spw_state_format)f, SPW_F32, ELEMS);
            memset(&a, 0, sizeof a);
            for (int i = 0; i < ELEMS; i++) {
                w[i] = (float)sin(i) * 0.3f;
                begin += w[i] * w[i];
            }
            spw_state_set(c.format, optimizers[o], a.weights, a.record, ELEMS, SPW_PART_MASTER, 0, ELEMS, w);
            for (uint64_t t = 1; t <= 200; t++) {
                spw_opt_hp hp = usual_hp();
                spw_opt_coef coef;
                hp.lr = o == 1 ? 0.1 : o == 3 ? 0.05 : 0.003;
                hp.weight_decay = 0;
                hp.grad_scale = 1;
                hp.step = t;
                coef = prepared(optimizers[o], &hp);
                spw_state_get(c.format, optimizers[o], a.weights, a.record, ELEMS, SPW_PART_MASTER, 0, ELEMS,
                              (float *)(void *)a.grad); /* the gradient of w^2 / 2 is w */
                spw_opt_step(&c, &(spw_opt_range){ELEMS, &coef}, 1);
            }
            spw_state_get(c.format, optimizers[o], a.weights, a.record, ELEMS, SPW_PART_MASTER, 0, ELEMS, w);
            for (int i = 0; i < ELEMS; i++)
                end += w[i] * w[i];
            if (!(end < begin / 10))
                fail_msg("%s %s: %g -> %g", optimizers[o]->name, spw_state_name(c.format), begin, end);
        }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_isa_identity),
        cmocka_unit_test(test_undo),
        cmocka_unit_test(test_misfits),
        cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_fused_equals_blocks),
        cmocka_unit_test(test_agrees_with_pytorch),
        cmocka_unit_test(test_dampening_alone),
        cmocka_unit_test(test_code_bounds),
        cmocka_unit_test(test_stochastic_rounding),
        cmocka_unit_test(test_lossy_moments_decay),
        cmocka_unit_test(test_learns),
        cmocka_unit_test(test_split_formats_keep_the_master),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_nearest_rounding),
    };
    if (getenv("SPW_SEED") != NULL)
        seed = strtoull(getenv("SPW_SEED"), NULL, 0);
    return cmocka_run_group_tests_name("optimizers", tests, NULL, NULL);
}
