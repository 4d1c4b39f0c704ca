/*
 * lib_ops - an operation of the cpu device beside the same in double, its backward beside central differences of that, element by
 * element, and 1, 2 and 5 threads giving the same bits. Errors fail the running cmocka test.
 */
#ifndef LIB_OPS_H
#define LIB_OPS_H

#include "spw_gpu.h"

enum { OPS_INPUTS_MAX = 4, OPS_N_MAX = 20000 };

/* An operation under test: `in` are its inputs, `out` one output; sizes in n and out_n. */
typedef struct ops_subject {
    const char *name;
    int inputs;
    uint64_t n[OPS_INPUTS_MAX], out_n;
    uint64_t d[11]; /* dimensions, as the operation reads them */
    unsigned flags;
    void (*reference)(const struct ops_subject *s, double *const *in, double *out);
    void (*forward)(const struct ops_subject *s, spw_gpu_queue *q, float *const *in, float *out);
    /* writes (or adds to) grads[i] of input i; grads[i] NULL: not wanted */
    void (*backward)(const struct ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out,
                     const float *dout, float *const *grads);
} ops_subject;

extern float ops_saved[2][OPS_N_MAX]; /* what forward leaves for backward */
extern int32_t ops_ids[OPS_N_MAX];

/* The next number of a sequence, from -1 to 1. */
float ops_draw(uint64_t *state);
/* Forward against the reference, backward against differences, and the same bits for 1, 2 and 5 threads. */
void ops_examine(const ops_subject *s);
struct CMUnitTest;
/* Runs the tests once for each instruction set of this CPU, or for SPW_ISA alone; returns how many failed. */
int ops_run_tests(const struct CMUnitTest *tests, size_t count);

#endif
