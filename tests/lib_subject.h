/*
 * lib_subject - an operation on arrays, run on a device and on the cpu device from the same numbers, which bf16 holds exactly; all arrays
 * are compared afterwards, inputs too. Outputs begin as NaN, so that what is not written shows. For the checks of lib_parity.
 */
#ifndef LIB_SUBJECT_H
#define LIB_SUBJECT_H

#include "lib_parity.h"

enum { ARRAYS_MAX = 9 };

typedef enum subject_kind { NONE, ACT, ACT_OUT, FP32, FP32_OUT, INT } subject_kind;

typedef struct subject_array {
    subject_kind kind;
    uint64_t n;
    uint64_t below; /* INT: values from least to below - 1 */
    int64_t least;
} subject_array;

typedef struct subject {
    const char *name;
    subject_array a[ARRAYS_MAX];
    uint64_t d[10];
    unsigned flags;
    double slack; /* times the tolerance; 0: 1 */
    void (*run)(const struct subject *s, spw_gpu_queue *q, void **p);
    void (*prepare)(const struct subject *s, float **host, int32_t **ints); /* NULL: as drawn */
} subject;

/* Memory for a test; fails it where there is none. */
void *subject_need(size_t bytes);
/* The compute type of the device that runs, or that subject_use() named, and element i of an array of it. */
void subject_use(const spw_gpu *gpu);
spw_dtype subject_type(void);
void *subject_elem(void *p, uint64_t i);
/* Runs s on both devices, and on p's again in each of its orders, which must give the same bits. Fails the running test. */
void subject_examine(const parity *p, const subject *s);

#endif
