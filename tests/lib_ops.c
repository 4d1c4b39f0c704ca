#include "lib_ops.h"
#include "lib_tiny.h"
#include "spw_base.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

float ops_saved[2][OPS_N_MAX];
int32_t ops_ids[OPS_N_MAX];

float
ops_draw(uint64_t *state)
{
    uint32_t r[4];
    spw_philox(99, 7, (*state)++, r);
    return 2.0f * spw_uniform_f32(r[0]) - 1.0f;
}

static double
weighted(const ops_subject *s, double *const *in, const float *weights, double *scratch)
{
    double sum = 0;
    s->reference(s, in, scratch);
    for (uint64_t i = 0; i < s->out_n; i++)
        sum += scratch[i] * (double)weights[i];
    return sum;
}

void
ops_examine(const ops_subject *s)
{
    float *in[OPS_INPUTS_MAX], *grads[OPS_INPUTS_MAX], *first_grads[OPS_INPUTS_MAX], *out = malloc(OPS_N_MAX * 4),
                                                                                     *first = malloc(OPS_N_MAX * 4);
    float *dout = malloc(OPS_N_MAX * 4);
    double *wide[OPS_INPUTS_MAX], *want = malloc(OPS_N_MAX * 8), *scratch = malloc(OPS_N_MAX * 8);
    uint64_t state = s->d[0] * 31 + s->d[1] * 7 + s->flags;
    assert_true(out && first && dout && want && scratch && s->out_n <= OPS_N_MAX);
    for (int k = 0; k < s->inputs; k++) {
        in[k] = malloc(s->n[k] * 4);
        grads[k] = malloc(s->n[k] * 4);
        first_grads[k] = malloc(s->n[k] * 4);
        wide[k] = malloc(s->n[k] * 8);
        assert_true(in[k] && grads[k] && first_grads[k] && wide[k]);
        for (uint64_t i = 0; i < s->n[k]; i++)
            wide[k][i] = (double)(in[k][i] = ops_draw(&state));
    }
    for (uint64_t i = 0; i < s->out_n; i++)
        dout[i] = ops_draw(&state);
    s->reference(s, wide, want);
    for (uint32_t threads = 1; threads <= 5; threads += threads == 1 ? 1 : 3) {
        spw_gpu *gpu = NULL;
        spw_gpu_queue *q = NULL;
        assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = threads}, NULL), SPW_OK);
        assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
        s->forward(s, q, in, out);
        for (uint64_t i = 0; i < s->out_n; i++) {
            if (!(fabs((double)out[i] - want[i]) <= 2e-5 * (1 + fabs(want[i]))))
                fail_msg("%s: output %llu is %.9g, the reference has %.9g", s->name, (unsigned long long)i,
                         (double)out[i], want[i]);
        }
        for (int k = 0; k < s->inputs; k++)
            memset(grads[k], 0, s->n[k] * 4);
        if (s->backward != NULL)
            s->backward(s, q, in, out, dout, grads);
        if (threads == 1) {
            memcpy(first, out, s->out_n * 4);
            for (int k = 0; k < s->inputs; k++)
                memcpy(first_grads[k], grads[k], s->n[k] * 4);
        }
        assert_memory_equal(first, out, s->out_n * 4);
        for (int k = 0; k < s->inputs; k++)
            assert_memory_equal(first_grads[k], grads[k], s->n[k] * 4);
        spw_gpu_queue_destroy(q);
        spw_gpu_close(gpu);
    }
    for (int k = 0; k < s->inputs && s->backward != NULL; k++) {
        uint64_t stride = s->n[k] / 60 + 1;
        for (uint64_t i = 0; i < s->n[k]; i += stride) {
            double x = wide[k][i], h = 1e-5, up, down, slope;
            wide[k][i] = x + h;
            up = weighted(s, wide, dout, scratch);
            wide[k][i] = x - h;
            down = weighted(s, wide, dout, scratch);
            wide[k][i] = x;
            slope = (up - down) / (2 * h);
            if (!(fabs((double)grads[k][i] - slope) <= 1e-4 * (1 + fabs(slope))))
                fail_msg("%s: gradient %llu of input %d is %.9g, differences give %.9g", s->name, (unsigned long long)i,
                         k, (double)grads[k][i], slope);
        }
    }
    for (int k = 0; k < s->inputs; k++) {
        free(in[k]);
        free(grads[k]);
        free(first_grads[k]);
        free(wide[k]);
    }
    free(out);
    free(first);
    free(dout);
    free(want);
    free(scratch);
}

int
ops_run_tests(const struct CMUnitTest *tests, size_t count)
{
    const char *given = getenv("SPW_ISA");
    int failed = 0;
    for (int isa = 0; isa < SPW_ISA_COUNT; isa++) {
        if (!spw_cpu_has((spw_isa)isa))
            continue;
        if (given != NULL && strcmp(given, spw_isa_name((spw_isa)isa)) != 0)
            continue;
        if (SANITIZED && given == NULL && isa > 0 && isa < (int)spw_cpu_isa_native())
            continue; /* the least and the most of this CPU */
        setenv("SPW_ISA", spw_isa_name((spw_isa)isa), 1);
        failed += _cmocka_run_group_tests(spw_isa_name((spw_isa)isa), tests, count, NULL, NULL);
    }
    return failed;
}
