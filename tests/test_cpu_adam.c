/*
 * The optimizer on the CPU: one truth on every instruction set, exact state formats, agreement with PyTorch. Random
 * inputs come from Philox; SPW_SEED replays a run.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <float.h>
#include <math.h>
#include <cmocka.h>
#include "cpu_adam_internal.h"
#include "vectors/adam_vectors.h"

enum { CHUNK_ELEMS = 4096, EXACT_FORMATS = SPW_STATE_SPLIT + 1 }; /* those with fused kernels */

/* One chunk in its own arrays, big enough for every format, with room to start anywhere in a cache line. */
typedef struct chunk {
    char weights[(CHUNK_ELEMS + 32) * 4], record[(CHUNK_ELEMS + 32) * 12], grad[(CHUNK_ELEMS + 32) * 4];
} chunk;

static uint64_t seed = 20240607;
static uint64_t draws;
static _Alignas(64) chunk chunk_a, chunk_b;
static float values[CHUNK_ELEMS], values_b[CHUNK_ELEMS];

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

/* Ordinary numbers most of the time; then every kind that is not. */
static float
random_float(bool special)
{
    static const uint32_t corners[] = {
        0x00000000u, 0x80000000u, 0x00000001u, 0x807fffffu, 0x00800000u, 0x7f7fffffu, 0xff7fffffu, 0x7f7f8000u,
        0x7f7f7fffu, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, 0xffffffffu, 0x3f808000u, 0x3f818000u,
    };
    uint32_t kind = special ? random_below(8) : 7;
    if (kind == 0)
        return spw_bits_f32(corners[random_below(sizeof corners / sizeof corners[0])]);
    if (kind == 1)
        return spw_bits_f32(random_u32());
    if (kind == 2)
        return spw_bits_f32(random_u32() & 0x807fffffu); /* denormal */
    return (spw_uniform_f32(random_u32()) - 0.5f) * ldexpf(1.0f, (int)random_below(24) - 20);
}

static spw_adam_hp
usual_hp(void)
{
    return (spw_adam_hp){.lr = 1e-3,
                         .beta1 = 0.9,
                         .beta2 = 0.999,
                         .eps = 1e-8,
                         .weight_decay = 0.01,
                         .decoupled = true,
                         .bias_correction = true,
                         .step = 1,
                         .grad_scale = 1.0};
}

static spw_adam_coef
prepared(const spw_adam_hp *hp)
{
    spw_adam_coef coef;
    spw_error err = {0};
    if (spw_adam_prepare(&coef, hp, &err) != SPW_OK)
        fail_msg("%s", err.message);
    return coef;
}

static bool
have_isa(spw_isa isa)
{
    spw_adam_hp hp = usual_hp();
    spw_adam_coef coef = prepared(&hp);
    float none = 0.0f;
    spw_adam_slice s = {.format = SPW_STATE_FP32, .weights = &none, .m = &none, .v = &none, .grad = &none};
    return spw_adam_step_isa(isa, &coef, &s, NULL) == SPW_OK;
}

/* A slice whose every array starts `skew` elements into its buffer. */
static spw_adam_slice
skewed_slice(chunk *c, spw_state_format f, spw_dtype grad_dtype, uint64_t n, const uint32_t skew[5])
{
    char *m = c->record + (CHUNK_ELEMS + 32) * 4, *v = m + (CHUNK_ELEMS + 32) * 4;
    return (spw_adam_slice){
        .format = f,
        .elems = n,
        .weights = c->weights + skew[0] * spw_state_weight_bytes(f),
        .master =
            f == SPW_STATE_FP32 ? NULL : c->record + skew[1] * (spw_state_record_bytes(f, &spw_opt_adam, 64) / 64 - 8),
        .m = (float *)(void *)m + skew[2],
        .v = (float *)(void *)v + skew[3],
        .grad = c->grad + skew[4] * spw_dtype_bytes(grad_dtype),
        .grad_dtype = grad_dtype,
    };
}

/* Random bytes everywhere, also around the slice, so that a stray store shows. */
static void
fill_chunk(chunk *c, const spw_adam_slice *s, bool special)
{
    uint64_t first = random_u32();
    memset(c, (int)(first & 0xff), sizeof *c);
    for (uint64_t i = 0; i < s->elems; i++) {
        float w = random_float(special), g = random_float(special);
        if (s->format == SPW_STATE_FP32)
            ((float *)s->weights)[i] = w;
        else if (s->format == SPW_STATE_MIXED)
            ((float *)s->master)[i] = w;
        else
            spw_split_f32(w, (uint16_t *)s->weights + i, (int16_t *)s->master + i);
        s->m[i] = random_float(special);
        s->v[i] = special && random_below(8) == 0 ? random_float(true) : fabsf(random_float(special));
        spw_convert((char *)(uintptr_t)s->grad + i * spw_dtype_bytes(s->grad_dtype), s->grad_dtype, &g, SPW_F32, 1);
    }
}

static bool
same_f32(float a, float b)
{
    return spw_f32_bits(a) == spw_f32_bits(b) || (a != a && b != b);
}

/* Equal bits in a slice, any NaN equal to any NaN; the same bytes outside. */
static void
assert_same_chunk(chunk *a, const spw_adam_slice *sa, chunk *b, const spw_adam_slice *sb)
{
    for (uint64_t i = 0; i < sa->elems; i++) {
        assert_true(same_f32(sa->m[i], sb->m[i]));
        assert_true(same_f32(sa->v[i], sb->v[i]));
        sb->m[i] = sa->m[i]; /* what is left must be equal byte for byte */
        sb->v[i] = sa->v[i];
        if (sa->format == SPW_STATE_FP32) {
            assert_true(same_f32(((float *)sa->weights)[i], ((float *)sb->weights)[i]));
            ((float *)sb->weights)[i] = ((float *)sa->weights)[i];
        } else if (sa->format == SPW_STATE_MIXED) {
            uint16_t *ha = (uint16_t *)sa->weights + i, *hb = (uint16_t *)sb->weights + i;
            assert_true(same_f32(((float *)sa->master)[i], ((float *)sb->master)[i]));
            assert_true(same_f32(spw_bf16_to_f32(*ha), spw_bf16_to_f32(*hb)));
            ((float *)sb->master)[i] = ((float *)sa->master)[i];
            *hb = *ha;
        }
    }
    assert_memory_equal(a, b, sizeof *a);
}

static void
test_isa_bit_identity(void **state)
{
    /* AVX2, AVX-512 and NEON give the bits of the scalar reference for every format, gradient type, length and alignment, on
     * ordinary numbers, denormals, huge ones, zeros, infinities and NaNs; bytes outside the slice stay as they were. */
    (void)state;
    for (spw_isa isa = SPW_ISA_AVX2; isa < SPW_ISA_COUNT; isa++) {
        if (!have_isa(isa)) {
            print_message("# %s: not on this machine\n", spw_isa_name(isa));
            continue;
        }
        for (uint32_t round = 0; round < 9 * 24; round++) {
            spw_state_format f = (spw_state_format)(round % 3);
            spw_dtype grad_dtype = (spw_dtype)(round / 3 % 3);
            uint32_t skew[5], n = round % 4 == 3 ? CHUNK_ELEMS : random_below(300);
            spw_adam_hp hp = usual_hp();
            spw_adam_coef coef;
            spw_adam_slice sa, sb;
            uint64_t bad_a = 1, bad_b = 2;
            for (int k = 0; k < 5; k++)
                skew[k] = round < 9 ? 0 : random_below(32);
            hp.decoupled = random_below(2) == 0;
            hp.bias_correction = random_below(4) != 0;
            hp.step = 1 + random_below(1000);
            hp.grad_scale = random_below(4) == 0 ? 0.37 : 1.0;
            hp.weight_decay = random_below(3) == 0 ? 0.0 : 0.1;
            coef = prepared(&hp);
            sa = skewed_slice(&chunk_a, f, grad_dtype, n, skew);
            sb = skewed_slice(&chunk_b, f, grad_dtype, n, skew);
            fill_chunk(&chunk_a, &sa, round % 5 != 0);
            chunk_b = chunk_a;
            assert_int_equal(spw_adam_step_isa(SPW_ISA_SCALAR, &coef, &sa, &bad_a), SPW_OK);
            assert_int_equal(spw_adam_step_isa(isa, &coef, &sb, &bad_b), SPW_OK);
            assert_int_equal(bad_a, bad_b);
            assert_same_chunk(&chunk_a, &sa, &chunk_b, &sb);
        }
    }
}

static void
test_slices_compose(void **state)
{
    /* A chunk cut into random slices gives the bits of one call on the whole chunk, so neither the thread count nor a
     * parameter's place in the chunk changes a result. */
    (void)state;
    for (uint32_t round = 0; round < 27; round++) {
        spw_state_format f = (spw_state_format)(round % 3);
        spw_dtype grad_dtype = (spw_dtype)(round / 3 % 3);
        spw_adam_hp hp = usual_hp();
        spw_adam_coef coef = prepared(&hp);
        spw_adam_slice whole, part;
        uint64_t bad_whole, bad_parts = 0;
        spw_adam_slice_init(&whole, f, chunk_a.weights, chunk_a.record, CHUNK_ELEMS, chunk_a.grad, grad_dtype, 0,
                            CHUNK_ELEMS);
        fill_chunk(&chunk_a, &whole, round % 2 == 1);
        chunk_b = chunk_a;
        bad_whole = spw_adam_step(&coef, &whole);
        for (uint64_t first = 0, n; first < CHUNK_ELEMS; first += n) {
            n = random_below(400);
            n = n < CHUNK_ELEMS - first ? n : CHUNK_ELEMS - first;
            spw_adam_slice_init(&part, f, chunk_b.weights, chunk_b.record, CHUNK_ELEMS, chunk_b.grad, grad_dtype, first,
                                n);
            bad_parts += spw_adam_step(&coef, &part);
        }
        spw_adam_slice_init(&part, f, chunk_b.weights, chunk_b.record, CHUNK_ELEMS, chunk_b.grad, grad_dtype, 0,
                            CHUNK_ELEMS);
        assert_int_equal(bad_whole, bad_parts);
        assert_same_chunk(&chunk_a, &whole, &chunk_b, &part);
    }
}

enum { WORKS = 8, WORK_ELEMS = 3 * 65536 + 7, WORK_BYTES = 5 * 4 * WORK_ELEMS };

/* Works of every exact format and of awkward sizes, none at all among them, whose arrays start at base. */
static void
lay_works(spw_adam_work works[WORKS], char *base)
{
    static const uint64_t sizes[WORKS] = {0, 5, 65536, 0, 0, WORK_ELEMS, 65537, 0};
    for (uint32_t i = 0; i < WORKS; i++) {
        spw_adam_hp hp = usual_hp();
        spw_state_format f = (spw_state_format)(i % EXACT_FORMATS);
        float *at = (float *)(base + (uint64_t)i * WORK_BYTES);
        hp.lr *= i + 1;
        works[i] = (spw_adam_work){.coef = prepared(&hp),
                                   .slice = {.format = f,
                                             .elems = sizes[i],
                                             .weights = at,
                                             .master = f == SPW_STATE_FP32 ? NULL : at + WORK_ELEMS,
                                             .m = at + 2 * WORK_ELEMS,
                                             .v = at + 3 * WORK_ELEMS,
                                             .grad = at + 4 * WORK_ELEMS,
                                             .grad_dtype = (spw_dtype)(i % 3)}};
    }
}

static void
test_run_on_a_pool(void **state)
{
    char *start = malloc((size_t)WORKS * WORK_BYTES), *expected = malloc((size_t)WORKS * WORK_BYTES);
    char *got = malloc((size_t)WORKS * WORK_BYTES);
    spw_adam_work works[WORKS];
    uint64_t bad = 0;
    (void)state;
    assert_true(start != NULL && expected != NULL && got != NULL);
    for (uint64_t i = 0; i < (uint64_t)WORKS * WORK_BYTES / sizeof(float); i++)
        ((float *)start)[i] = random_float(i % 64 == 0);
    memcpy(expected, start, (size_t)WORKS * WORK_BYTES);
    lay_works(works, expected);
    for (uint32_t i = 0; i < WORKS; i++)
        bad += spw_adam_step(&works[i].coef, &works[i].slice);
    for (uint32_t threads = 1; threads <= 3; threads++) {
        spw_pool *pool = NULL;
        spw_error err = {0};
        assert_int_equal(spw_pool_create(&pool, threads, "test", &err), SPW_OK);
        memcpy(got, start, (size_t)WORKS * WORK_BYTES);
        lay_works(works, got);
        assert_int_equal(spw_adam_run(pool, works, WORKS), bad);
        assert_memory_equal(got, expected, (size_t)WORKS * WORK_BYTES);
        assert_int_equal(spw_adam_run(pool, works, 0), 0);
        spw_pool_destroy(pool);
    }
    assert_true(bad > 0);
    free(start);
    free(expected);
    free(got);
}

/* What the header promises for one pattern. */
static void
check_split(uint32_t u)
{
    uint16_t hi;
    int16_t lo;
    float w = spw_bits_f32(u), hi_value;
    uint32_t magnitude = u & 0x7fffffffu, back;
    spw_split_f32(w, &hi, &lo);
    back = spw_f32_bits(spw_join_f32(hi, lo));
    hi_value = spw_bf16_to_f32(hi);
    if (magnitude > 0x7f800000u) {
        if (hi != 0x7fc0 || lo != 0)
            fail_msg("NaN %08x gives %04x %d", u, hi, lo);
    } else if (magnitude > 0x7f7f7fffu && magnitude < 0x7f800000u) {
        if (back != ((u & 0x80000000u) | 0x7f7f7fffu) || !isfinite(hi_value))
            fail_msg("%08x near the largest float comes back as %08x, hi %04x", u, back, hi);
    } else {
        if (back != u)
            fail_msg("%08x comes back as %08x", u, back);
        /* Nearest: the same bf16 as round-to-even, except that a tie goes away from zero. */
        if (hi != spw_f32_to_bf16(w) && !((u & 0xffffu) == 0x8000u && hi == (u >> 16) + 1))
            fail_msg("%08x has hi %04x", u, hi);
    }
}

static void
test_split_join(void **state)
{
    /* Split and join restore every master exactly up to the guard near the largest float; hi is the nearest bf16 and
     * finite for finite masters; NaNs stay NaNs. Exponent boundaries, every hi's ties, a stride over all bits. */
    (void)state;
    for (uint32_t top = 0; top < 512; top++) {
        for (uint32_t d = 0; d < 0x400; d++)
            check_split((top << 23) + d - 0x200);
    }
    for (uint32_t hi = 0; hi < 0x10000; hi++) {
        for (uint32_t d = 0; d < 7; d++) {
            check_split((hi << 16) + 0x8000 + d - 3);
            check_split((hi << 16) + d - 3);
        }
    }
    for (uint64_t u = 0; u < 0x100000000u; u += 1009)
        check_split((uint32_t)u);
}

/* Nearest of the two bf16 neighbours in double, ties away from zero; split's hi wherever that is the same number. */
static void
check_weight(uint16_t weight, float master)
{
    double below = spw_bf16_to_f32((uint16_t)(spw_f32_bits(master) >> 16)), to_below = fabs((double)master - below);
    double above = spw_bf16_to_f32((uint16_t)((spw_f32_bits(master) >> 16) + 1)),
           to_above = fabs(above - (double)master);
    uint16_t hi;
    int16_t lo;
    spw_split_f32(master, &hi, &lo);
    if (isnan(master)) {
        assert_true(isnan(spw_bf16_to_f32(weight)));
    } else if (fabsf(master) < 0x1.fep127f) {
        assert_true(spw_bf16_to_f32(weight) == (float)(to_below < to_above ? below : above));
        assert_int_equal(weight, hi);
    } else {
        assert_int_equal(weight,
                         isinf(master) || fabsf(master) >= 0x1.ffp127f ? (signbit(master) ? 0xff80 : 0x7f80) : hi);
    }
}

static void
test_rounding_every_isa(void **state)
{
    /* With lr 0 a step leaves the master alone and only rounds: on every instruction set mixed weights are
     * the master's nearest bf16 with ties away from zero, bit for bit, and split is spw_split_f32. */
    spw_adam_hp hp = usual_hp();
    spw_adam_coef coef;
    (void)state;
    hp.lr = 0.0;
    coef = prepared(&hp);
    for (spw_isa isa = SPW_ISA_SCALAR; isa < SPW_ISA_COUNT; isa++) {
        if (!have_isa(isa))
            continue;
        for (uint32_t base = 0; base < 512; base++) {
            spw_adam_slice s;
            for (uint32_t i = 0; i < CHUNK_ELEMS;
                 i++) /* around each exponent boundary, then anywhere in the exponent */
                values[i] = spw_bits_f32((base << 23) + (i < 256 ? i - 128 : i * 2039 + base));
            for (int f = SPW_STATE_MIXED; f <= SPW_STATE_SPLIT; f++) {
                memset(&chunk_a, 0, sizeof chunk_a);
                spw_state_set((spw_state_format)f, &spw_opt_adam, chunk_a.weights, chunk_a.record, CHUNK_ELEMS,
                              SPW_PART_MASTER, 0, CHUNK_ELEMS, values);
                chunk_b = chunk_a;
                if (f == SPW_STATE_MIXED)
                    memset(chunk_a.weights, 0xa5, sizeof chunk_a.weights);
                spw_adam_slice_init(&s, (spw_state_format)f, chunk_a.weights, chunk_a.record, CHUNK_ELEMS, chunk_a.grad,
                                    SPW_F32, 0, CHUNK_ELEMS);
                assert_int_equal(spw_adam_step_isa(isa, &coef, &s, NULL), SPW_OK);
                assert_memory_equal(chunk_a.weights, chunk_b.weights, CHUNK_ELEMS * 2);
                if (f == SPW_STATE_SPLIT)
                    assert_memory_equal(chunk_a.record, chunk_b.record, CHUNK_ELEMS * 2);
                else
                    for (uint32_t i = 0; i < CHUNK_ELEMS; i++)
                        check_weight(((uint16_t *)chunk_a.weights)[i], values[i]);
            }
        }
    }
}

static void
test_split_equals_mixed(void **state)
{
    /* 1000 steps from the same start: split and mixed hold the same master, m, v and weights bit for bit, and fp32's the
     * same master, m and v. */
    static _Alignas(64) chunk chunks[EXACT_FORMATS];
    spw_adam_hp hp = usual_hp();
    (void)state;
    for (uint32_t i = 0; i < CHUNK_ELEMS; i++)
        values[i] = random_float(false);
    memset(chunks, 0, sizeof chunks);
    for (int f = 0; f < EXACT_FORMATS; f++)
        spw_state_set((spw_state_format)f, &spw_opt_adam, chunks[f].weights, chunks[f].record, CHUNK_ELEMS,
                      SPW_PART_MASTER, 0, CHUNK_ELEMS, values);
    for (hp.step = 1; hp.step <= 1000; hp.step++) {
        spw_adam_coef coef = prepared(&hp);
        for (uint32_t i = 0; i < CHUNK_ELEMS; i++)
            values[i] = random_float(false);
        for (int f = 0; f < EXACT_FORMATS; f++) {
            spw_adam_slice s;
            spw_adam_slice_init(&s, (spw_state_format)f, chunks[f].weights, chunks[f].record, CHUNK_ELEMS, values,
                                SPW_F32, 0, CHUNK_ELEMS);
            assert_int_equal(spw_adam_step(&coef, &s), 0);
        }
    }
    for (int part = 0; part < SPW_PART_COUNT; part++) {
        for (int f = 0; f < EXACT_FORMATS; f++) {
            spw_state_get((spw_state_format)f, &spw_opt_adam, chunks[f].weights, chunks[f].record, CHUNK_ELEMS,
                          (spw_state_part)part, 0, CHUNK_ELEMS, f == 0 ? values : values_b);
            assert_memory_equal(values, f == 0 ? values : values_b, sizeof values);
        }
    }
    assert_memory_equal(chunks[SPW_STATE_SPLIT].weights, chunks[SPW_STATE_MIXED].weights, CHUNK_ELEMS * 2);
}

/* The hash of tests/gen_adam_vectors.py. */
static double
vector_unit(uint32_t x)
{
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    x ^= x >> 16;
    return ((double)(x >> 8) - 8388608.0) / 8388608.0;
}

/* Distance in ulps of the larger of |want| and `size`. */
static double
ulps(float got, float want, float size)
{
    float scale = fabsf(want) > size ? fabsf(want) : size;
    return fabs((double)got - (double)want) / ((double)nextafterf(scale, INFINITY) - (double)scale);
}

static void
test_agrees_with_pytorch(void **state)
{
    /* 100 steps of AdamW and of Adam with L2 agree with PyTorch's within 2 ulp for parameters, 1 ulp of 0.25 (a
     * gradient's size; m itself crosses zero) for m, and 12 ulp for v. PyTorch rounds beta2 v before it adds, where we
     * have one fma: up to half an ulp more per step, which adds up over 100 steps with beta2 0.999 as a walk does. The
     * measured worst is 1, 0 and 10. */
    double worst[3] = {0};
    static const double bounds[3] = {2, 1, 12}; /* parameter, m, v */
    (void)state;
    for (int c = 0; c < VECTOR_CASES; c++) {
        const struct vector_case *vc = &vector_cases[c];
        float p[VECTOR_ELEMS], m[VECTOR_ELEMS] = {0}, v[VECTOR_ELEMS] = {0}, grad[VECTOR_ELEMS];
        spw_adam_slice s = {
            .format = SPW_STATE_FP32, .elems = VECTOR_ELEMS, .weights = p, .m = m, .v = v, .grad = grad};
        spw_adam_hp hp = {.lr = vc->lr,
                          .beta1 = vc->beta1,
                          .beta2 = vc->beta2,
                          .eps = vc->eps,
                          .weight_decay = vc->weight_decay,
                          .decoupled = vc->decoupled,
                          .bias_correction = true,
                          .grad_scale = 1.0};
        int checked = 0;
        for (uint32_t i = 0; i < VECTOR_ELEMS; i++)
            p[i] = (float)((1.0 + vector_unit(0x10000000u + i) / 2) * (i & 1 ? -1.0 : 1.0));
        for (hp.step = 1; checked < VECTOR_STEPS; hp.step++) {
            spw_adam_coef coef = prepared(&hp);
            for (uint32_t i = 0; i < VECTOR_ELEMS; i++)
                grad[i] = (float)(vector_unit((uint32_t)hp.step * VECTOR_ELEMS + i) + (i & 1 ? 0.0 : 0.5));
            assert_int_equal(spw_adam_step(&coef, &s), 0);
            if (hp.step != vector_steps[checked])
                continue;
            for (int part = 0; part < 3; part++) {
                const float *got = part == 0 ? p : part == 1 ? m : v;
                for (uint32_t i = 0; i < VECTOR_ELEMS; i++) {
                    float want = spw_bits_f32(vc->bits[checked][part][i]);
                    double distance = ulps(got[i], want, part == 1 ? 0.25f : 0.0f);
                    worst[part] = distance > worst[part] ? distance : worst[part];
                    if (!(distance <= bounds[part]))
                        fail_msg("%s step %u part %d element %u: %.9g, PyTorch %.9g, %.1f ulp", vc->name,
                                 vector_steps[checked], part, i, (double)got[i], (double)want, distance);
                }
            }
            checked++;
        }
    }
    print_message("# worst distance from PyTorch in ulp: parameter %.1f, m %.1f, v %.1f\n", worst[0], worst[1],
                  worst[2]);
}

static void
test_refused_hyper_parameters(void **state)
{
    /* Every bad hyper-parameter is refused by name with SPW_EINVAL, and the coefficients stay as they were. */
    static const struct {
        size_t offset;
        double value;
        const char *name;
    } bad[] = {
#define BAD(field, value) {offsetof(spw_adam_hp, field), value, #field}
        BAD(lr, NAN),
        BAD(lr, INFINITY),
        BAD(lr, -1e-3),
        BAD(lr, 1e39),
        BAD(beta1, 1.0),
        BAD(beta1, -0.1),
        BAD(beta1, NAN),
        BAD(beta2, 1.0),
        BAD(beta2, NAN),
        BAD(beta2, 2.0),
        BAD(eps, 0.0),
        BAD(eps, -1e-8),
        BAD(eps, NAN),
        BAD(eps, INFINITY),
        BAD(eps, 1e-60),
        BAD(weight_decay, -1.0),
        BAD(weight_decay, NAN),
        BAD(grad_scale, NAN),
        BAD(grad_scale, INFINITY),
        BAD(grad_scale, -1.0),
#undef BAD
    };
    spw_adam_coef before, after;
    spw_adam_hp hp;
    (void)state;
    memset(&before, 0x5a, sizeof before);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        spw_error err = {0};
        hp = usual_hp();
        memcpy((char *)&hp + bad[i].offset, &bad[i].value, sizeof bad[i].value);
        after = before;
        assert_int_equal(spw_adam_prepare(&after, &hp, &err), SPW_EINVAL);
        assert_memory_equal(&after, &before, sizeof before);
        assert_non_null(strstr(err.message, bad[i].name));
        assert_int_equal(spw_adam_prepare(&after, &hp, NULL), SPW_EINVAL);
    }
    hp = usual_hp();
    hp.step = 0;
    after = before;
    assert_int_equal(spw_adam_prepare(&after, &hp, NULL), SPW_EINVAL);
    hp = usual_hp();
    hp.lr = 1e38; /* fine by itself, not divided by 1 - 0.9 */
    assert_int_equal(spw_adam_prepare(&after, &hp, NULL), SPW_EINVAL);
    assert_memory_equal(&after, &before, sizeof before);
}

static void
test_coefficients(void **state)
{
    /* Bias corrections follow their formulas, are off when asked, and do not lose step 1 or step 10^9. */
    spw_adam_hp hp = usual_hp();
    spw_adam_coef coef = prepared(&hp);
    (void)state;
    assert_true(coef.step_size == (float)(1e-3 / (1.0 - 0.9)));
    assert_true(coef.inv_bc2_sqrt == (float)(1.0 / sqrt(1.0 - 0.999)));
    assert_true(coef.l2 == 0.0f && coef.decay == (float)(1.0 - 1e-3 * 0.01));
    hp.step = 1000000000;
    hp.decoupled = false;
    coef = prepared(&hp);
    assert_true(coef.step_size == 1e-3f && coef.inv_bc2_sqrt == 1.0f);
    assert_true(coef.l2 == 0.01f && coef.decay == 1.0f);
    hp.step = 1;
    hp.bias_correction = false;
    hp.beta1 = 0.0;
    coef = prepared(&hp);
    assert_true(coef.step_size == 1e-3f && coef.inv_bc2_sqrt == 1.0f && coef.one_minus_beta1 == 1.0f);
}

static void
test_grad_scale(void **state)
{
    /* grad_scale 0 is a step with zero gradients, a power of two is the same as scaling the gradient beforehand, and
     * infinity times 0 is still seen as not finite. */
    uint32_t skew[5] = {0};
    spw_adam_slice sa = skewed_slice(&chunk_a, SPW_STATE_SPLIT, SPW_F32, 1000, skew);
    spw_adam_slice sb = skewed_slice(&chunk_b, SPW_STATE_SPLIT, SPW_F32, 1000, skew);
    spw_adam_hp scaled = usual_hp(), plain = usual_hp();
    static const float scales[] = {0.0f, 0.125f, 1024.0f};
    (void)state;
    for (int k = 0; k < 3; k++) {
        spw_adam_coef coef_a, coef_b = prepared(&plain);
        scaled.grad_scale = (double)scales[k];
        coef_a = prepared(&scaled);
        fill_chunk(&chunk_a, &sa, false);
        chunk_b = chunk_a;
        for (int i = 0; i < 1000; i++)
            ((float *)(uintptr_t)sb.grad)[i] *= scales[k];
        assert_int_equal(spw_adam_step(&coef_a, &sa), 0);
        assert_int_equal(spw_adam_step(&coef_b, &sb), 0);
        assert_memory_equal(chunk_a.weights, chunk_b.weights, sizeof chunk_a.weights);
        assert_memory_equal(chunk_a.record, chunk_b.record, sizeof chunk_a.record);
    }
    scaled.grad_scale = 0.0;
    for (int i = 0; i < 1000; i++)
        ((float *)(uintptr_t)sa.grad)[i] = i % 10 == 0 ? INFINITY : 1.0f;
    for (spw_isa isa = SPW_ISA_SCALAR; isa < SPW_ISA_COUNT; isa++) {
        spw_adam_coef coef = prepared(&scaled);
        uint64_t nonfinite_count = 100;
        assert_true(spw_adam_step_isa(isa, &coef, &sa, &nonfinite_count) == SPW_OK || !have_isa(isa));
        assert_int_equal(nonfinite_count, 100);
    }
}

static void
test_nonfinite_count(void **state)
{
    /* The count is the number of infinities and NaNs in the gradient, in every gradient type, format and place, and
     * no finite gradient is counted, not even the largest. */
    static const uint32_t bits[3][5] = {{0x7f800000u, 0xff800000u, 0x7fc00000u, 0xff800001u, 0x7f7fffffu},
                                        {0x7f80u, 0xff80u, 0x7fc0u, 0xff81u, 0x7f7fu},
                                        {0x7c00u, 0xfc00u, 0x7e00u, 0xfc01u, 0x7bffu}};
    spw_adam_hp hp = usual_hp();
    spw_adam_coef coef = prepared(&hp);
    (void)state;
    for (spw_isa isa = SPW_ISA_SCALAR; isa < SPW_ISA_COUNT; isa++) {
        for (uint32_t round = 0; have_isa(isa) && round < 90; round++) {
            uint32_t skew[5] = {0}, n = 1 + random_below(200);
            uint64_t want = 0, got = 0;
            spw_dtype grad_dtype = (spw_dtype)(round / 3 % 3);
            spw_adam_slice s = skewed_slice(&chunk_a, (spw_state_format)(round % 3), grad_dtype, n, skew);
            fill_chunk(&chunk_a, &s, false);
            for (uint32_t i = 0; i < n; i++) {
                uint32_t kind = random_below(10);
                if (kind < 5 && grad_dtype == SPW_F32)
                    memcpy(chunk_a.grad + i * 4, &bits[0][kind], 4);
                else if (kind < 5)
                    ((uint16_t *)(void *)chunk_a.grad)[i] = (uint16_t)bits[grad_dtype][kind];
                want += kind < 4;
            }
            assert_int_equal(spw_adam_step_isa(isa, &coef, &s, &got), SPW_OK);
            assert_int_equal(got, want);
        }
    }
}

static void
test_state_get_set(void **state)
{
    /* Every part of every format comes back as it was set, for any range, and setting one part or range leaves the
     * others; setting the master sets the weights the model reads. */
    static float want[SPW_PART_COUNT][CHUNK_ELEMS];
    (void)state;
    for (int f = 0; f < EXACT_FORMATS; f++) {
        spw_state_format format = (spw_state_format)f, parsed = SPW_STATE_COUNT;
        assert_true(spw_state_parse(spw_state_name(format), &parsed) && parsed == format);
        memset(&chunk_a, 0, sizeof chunk_a);
        memset(want, 0, sizeof want);
        for (uint32_t round = 0; round < 200; round++) {
            spw_state_part part = (spw_state_part)random_below(SPW_PART_COUNT);
            uint32_t first = random_below(CHUNK_ELEMS + 1), n = random_below(CHUNK_ELEMS - first + 1);
            for (uint32_t i = 0; i < n; i++)
                values[i] = want[part][first + i] = random_float(false);
            spw_state_set(format, &spw_opt_adam, chunk_a.weights, chunk_a.record, CHUNK_ELEMS, part, first, n, values);
            first = random_below(CHUNK_ELEMS + 1);
            n = random_below(CHUNK_ELEMS - first + 1);
            for (int p = 0; p < SPW_PART_COUNT; p++) {
                spw_state_get(format, &spw_opt_adam, chunk_a.weights, chunk_a.record, CHUNK_ELEMS, (spw_state_part)p,
                              first, n, values_b);
                assert_memory_equal(values_b, want[p] + first, n * sizeof(float));
            }
        }
        for (uint32_t i = 0; i < CHUNK_ELEMS; i++) {
            uint16_t hi;
            int16_t lo;
            spw_split_f32(want[0][i], &hi, &lo);
            if (f == SPW_STATE_MIXED || f == SPW_STATE_SPLIT) /* rounded alike, ties away from zero */
                assert_int_equal(((uint16_t *)(void *)chunk_a.weights)[i], hi);
        }
    }
    spw_state_set(SPW_STATE_FP32, &spw_opt_adam, chunk_a.weights, NULL, CHUNK_ELEMS, SPW_PART_MASTER, 7, 100, values);
    spw_state_get(SPW_STATE_FP32, &spw_opt_adam, chunk_a.weights, NULL, CHUNK_ELEMS, SPW_PART_MASTER, 7, 100, values_b);
    assert_memory_equal(values, values_b, 400);
}

static void
test_state_facts(void **state)
{
    /* Sizes, names and types of the formats are those of the header's table; unknown names are refused. */
    spw_state_format f = SPW_STATE_MIXED;
    (void)state;
    assert_int_equal(spw_state_weight_bytes(SPW_STATE_FP32), 4);
    assert_int_equal(spw_state_record_bytes(SPW_STATE_FP32, &spw_opt_adam, 64), 512);
    assert_int_equal(spw_state_weight_bytes(SPW_STATE_MIXED), 2);
    assert_int_equal(spw_state_record_bytes(SPW_STATE_MIXED, &spw_opt_adam, 64), 768);
    assert_int_equal(spw_state_weight_bytes(SPW_STATE_SPLIT), 2);
    assert_int_equal(spw_state_record_bytes(SPW_STATE_SPLIT, &spw_opt_adam, 64), 640);
    assert_int_equal(spw_state_weight_dtype(SPW_STATE_SPLIT), SPW_BF16);
    assert_true(spw_state_update_reads_weights(SPW_STATE_FP32) && spw_state_update_reads_weights(SPW_STATE_SPLIT));
    assert_false(spw_state_update_reads_weights(SPW_STATE_MIXED));
    assert_false(spw_state_parse("int4", &f));
    assert_false(spw_state_parse("", &f));
    assert_int_equal(f, SPW_STATE_MIXED);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_isa_bit_identity),    cmocka_unit_test(test_slices_compose),
        cmocka_unit_test(test_run_on_a_pool),       cmocka_unit_test(test_split_join),
        cmocka_unit_test(test_rounding_every_isa),  cmocka_unit_test(test_split_equals_mixed),
        cmocka_unit_test(test_agrees_with_pytorch), cmocka_unit_test(test_refused_hyper_parameters),
        cmocka_unit_test(test_coefficients),        cmocka_unit_test(test_grad_scale),
        cmocka_unit_test(test_nonfinite_count),     cmocka_unit_test(test_state_get_set),
        cmocka_unit_test(test_state_facts),
    };
    const char *wish = getenv("SPW_SEED");
    if (wish != NULL)
        seed = strtoull(wish, NULL, 10);
    printf("# SPW_SEED=%llu\n", (unsigned long long)seed);
    return cmocka_run_group_tests_name("cpu_adam", tests, NULL, NULL);
}
