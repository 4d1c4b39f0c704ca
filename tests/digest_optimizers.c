/*
 * Prints a digest of the state after three steps for every optimizer, format and gradient type, on the instruction set
 * named (default: the best). test_other_arch.sh compares the lines of this machine with those of another architecture.
 */
#include "spw_cpu_adam.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ELEMS = 4096 };
static char weights[ELEMS * 4], record[ELEMS * 12], grad[ELEMS * 4];

/* Numbers of all magnitudes; every 37th is a special one. */
static float
number(uint64_t stream, uint64_t i)
{
    static const uint32_t special[] = {0x00000000u, 0x80000000u, 0x00000001u, 0x807fffffu, 0x7f7fffffu, 0x7f800000u};
    uint32_t words[4];
    spw_philox(1234, stream, i, words);
    if (i % 37 == 5)
        return spw_bits_f32(special[words[0] % 6]);
    return (spw_uniform_f32(words[0]) - 0.5f) * ldexpf(1.0f, (int)(words[1] % 24) - 20);
}

static uint64_t
digest(uint64_t h, const void *p, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++)
        h = (h ^ ((const unsigned char *)p)[i]) * 0x100000001b3u;
    return h;
}

static void
one(spw_isa isa, const spw_optimizer *o, spw_state_format f, spw_dtype dtype)
{
    static float x[ELEMS];
    uint64_t bad = 0, sum = 0xcbf29ce484222325u, counted = 0;
    memset(record, 0, sizeof record);
    for (int part = 0; part <= (int)o->moment_count; part++) {
        for (uint64_t i = 0; i < ELEMS; i++)
            x[i] = part == 0 ? number(1, i) : fabsf(number((uint64_t)part + 1, i));
        spw_state_set(f, o, weights, record, ELEMS, (spw_state_part)part, 0, ELEMS, x);
    }
    for (uint64_t t = 1; t <= 3; t++) {
        spw_opt_hp hp = {.lr = 1e-2,
                         .weight_decay = 0.1,
                         .beta1 = 0.9,
                         .beta2 = 0.99,
                         .eps = 1e-8,
                         .decoupled = t != 2,
                         .bias_correction = true,
                         .momentum = 0.9,
                         .step = t,
                         .grad_scale = 0.5,
                         .seed = 7};
        spw_opt_coef coef;
        for (uint64_t i = 0; i < ELEMS; i++)
            x[i] = number(10 + t, i);
        spw_convert(grad, dtype, x, SPW_F32, ELEMS);
        if (spw_opt_prepare(&coef, o, &hp, NULL) != SPW_OK ||
            spw_opt_step_isa(isa,
                             &(spw_opt_chunk){.format = f,
                                              .elems = ELEMS,
                                              .weights = weights,
                                              .record = record,
                                              .grad = grad,
                                              .grad_dtype = dtype},
                             &(spw_opt_range){ELEMS, &coef}, 1, &bad) != SPW_OK)
            exit(77);
        counted += bad;
    }
    /* As numbers, with every NaN the same: payloads are the hardware's where a fused kernel meets two of them. */
    for (int part = 0; part <= (int)o->moment_count; part++) {
        spw_state_get(f, o, weights, record, ELEMS, (spw_state_part)part, 0, ELEMS, x);
        for (uint64_t i = 0; i < ELEMS; i++)
            x[i] = isnan(x[i]) ? spw_bits_f32(0x7fc00000u) : x[i];
        sum = digest(sum, x, sizeof x);
    }
    printf("%s %s %s %016llx %llu\n", o->name, spw_state_name(f), spw_dtype_name(dtype), (unsigned long long)sum,
           (unsigned long long)counted);
}

int
main(int argc, char **argv)
{
    static const spw_optimizer *const all[] = {&spw_opt_adam, &spw_opt_adagrad, &spw_opt_lion, &spw_opt_sgd};
    spw_isa isa = argc > 1 && strcmp(argv[1], "scalar") == 0 ? SPW_ISA_SCALAR : spw_cpu_isa();
    for (int o = 0; o < 4; o++)
        for (int f = 0; f < SPW_STATE_COUNT; f++)
            for (int d = 0; d < SPW_DTYPE_COUNT; d++)
                one(isa, all[o], (spw_state_format)f, (spw_dtype)d);
    return 0;
}
