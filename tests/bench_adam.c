/*
 * How close the optimizer comes to memory: one thread, each state format, against an in-place stream over the same number
 * of bytes, interleaved, medians. usage: bench_adam [million parameters]
 */
#include "spw_cpu_adam.h"
#include <stdio.h>
#include <stdlib.h>

enum { ROUNDS = 9, EXACT_FORMATS = SPW_STATE_SPLIT + 1 };

static int
by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Reads and writes every byte once: what no in-place update can beat. */
static void
stream(float *x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        x[i] = x[i] * 0.5f + 1.0f;
}

int
main(int argc, char **argv)
{
    uint64_t n = (argc > 1 ? strtoull(argv[1], NULL, 10) : 16) * 1000000 / 4096 * 4096 + 4096;
    printf("# bench adam  spillway %s  isa %s  1 thread  %.1f M parameters per chunk\n", SPW_VERSION,
           spw_isa_name(spw_cpu_isa()), (double)n * 1e-6);
    printf("#  format  Mparam/s     GB/s  ceiling GB/s  ratio\n");
    for (int f = 0; f < EXACT_FORMATS; f++) {
        static const double bytes[EXACT_FORMATS] = {28, 30, 28}; /* read and written per parameter, fp32 gradients */
        spw_region weights, record, grad;
        spw_adam_coef coef;
        spw_adam_slice slice;
        double adam_s[ROUNDS], stream_s[ROUNDS];
        spw_adam_hp hp = {.lr = 1e-4,
                          .beta1 = 0.9,
                          .beta2 = 0.95,
                          .eps = 1e-8,
                          .weight_decay = 0.1,
                          .decoupled = true,
                          .bias_correction = true,
                          .step = 1,
                          .grad_scale = 1};
        uint64_t record_bytes = spw_state_record_bytes((spw_state_format)f, &spw_opt_adam, n);
        if (spw_region_map(&weights, n * spw_state_weight_bytes((spw_state_format)f), 0, NULL) != SPW_OK ||
            spw_region_map(&record, record_bytes, 0, NULL) != SPW_OK ||
            spw_region_map(&grad, n * 4, 0, NULL) != SPW_OK || spw_adam_prepare(&coef, &hp, NULL) != SPW_OK)
            return 1;
        spw_adam_slice_init(&slice, (spw_state_format)f, weights.base, record.base, n, grad.base, SPW_F32, 0, n);
        for (int r = -1; r < ROUNDS; r++) { /* the first round warms up */
            uint64_t a = spw_now_ns(), b, c;
            spw_adam_step(&coef, &slice);
            b = spw_now_ns();
            stream(grad.base, n);
            stream(record.base, record_bytes / 4);
            c = spw_now_ns();
            if (r >= 0) {
                adam_s[r] = (double)(b - a) * 1e-9;
                stream_s[r] = (double)(c - b) * 1e-9;
            }
            memset(record.base, 0, record_bytes);
            memset(grad.base, 0, n * 4);
        }
        qsort(adam_s, ROUNDS, sizeof *adam_s, by_value);
        qsort(stream_s, ROUNDS, sizeof *stream_s, by_value);
        {
            double gb = bytes[f] * (double)n / adam_s[ROUNDS / 2] * 1e-9;
            double ceiling = 2.0 * (double)(record_bytes + n * 4) / stream_s[ROUNDS / 2] * 1e-9;
            printf("   %-7s %8.0f %8.1f %13.1f %6.2f\n", spw_state_name((spw_state_format)f),
                   (double)n / adam_s[ROUNDS / 2] * 1e-6, gb, ceiling, gb / ceiling);
        }
        spw_region_unmap(&weights);
        spw_region_unmap(&record);
        spw_region_unmap(&grad);
    }
    return 0;
}
