/*
 * lib_subject - an operation on arrays, run on a device and on the cpu device from the same numbers, which bf16 holds exactly; all arrays
 * are compared afterwards, inputs too. Outputs begin as NaN, so that what is not written shows. For the checks of lib_parity.
 *
 * An array is right if what was added to it has a small error as a whole, beside its own size, and no element has one that is large
 * beside the row it is in. The cpu device computes in fp32: rounding its result to the array's type makes an error too, which no device
 * can avoid, and which is taken off. SPW_SEED draws other numbers.
 */
#ifndef LIB_SUBJECT_H
#define LIB_SUBJECT_H

#include "lib_parity.h"

enum { ARRAYS_MAX = 12, HEADS_MAX = 128 };

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
    uint64_t d[12];
    unsigned flags;
    uint64_t row[ARRAYS_MAX];      /* elements of about the same size; 0: the whole array */
    uint64_t heads[ARRAYS_MAX];    /* so many rows in turn are an array each; 0: 1 */
    double row_least;              /* a row is at least so large beside its array */
    double worst[SPW_DTYPE_COUNT]; /* error of an array beside its norm; 0: that of sums in fp32 */
    double more[ARRAYS_MAX];       /* an array's error may be so many times as large; 0: 1 */
    void (*run)(const struct subject *s, spw_gpu_queue *q, void **p);
    void (*prepare)(const struct subject *s, float **host, int32_t **ints); /* NULL: as drawn */
    /* The same in fp64 (lib_reference), in one of `ways`; NULL: there is none. */
    void (*reference)(const struct subject *s, spw_dtype type, unsigned way, float **arrays, int32_t **ints);
    unsigned ways;
} subject;

/*
 * worst[] of products: sums of thousands of terms in any order; on tensor cores, which cut off what they add where it has 24 bits, and
 * of 8-bit floats where it has 14.
 */
#define SUBJECT_PRODUCT                                                                                                \
    {                                                                                                                  \
        3e-6, 2e-5, 2e-5                                                                                               \
    }
#define SUBJECT_PRODUCT_FP8                                                                                            \
    {                                                                                                                  \
        5e-4, 5e-4, 5e-4                                                                                               \
    }

/* Memory for a test; fails it where there is none. */
void *subject_need(size_t bytes);
/* The compute type of the device that runs, or that subject_use() named, and element i of an array of it. */
void subject_use(const spw_gpu *gpu);
spw_dtype subject_type(void);
void *subject_elem(void *p, uint64_t i);
/* x as a number of a type: fp32, bf16 or f16. */
float subject_rounded(spw_dtype type, float x);
/* Number i of those that key names, between -1 and 1, one that bf16 holds; and where a key begins, by SPW_SEED. */
float subject_number(uint64_t key, uint64_t i);
uint64_t subject_key(uint64_t of);
/* Scales n numbers by a power of two such that a sum of K of them, each times one between -1 and 1, deviates by 1 to 2. */
void subject_scale(float *x, uint64_t n, uint64_t K);
/* Runs s on both devices, and on p's again in each of its orders, which must give the same bits. Fails the running test. */
void subject_examine(const parity *p, const subject *s);
/* Prints the worst errors since the last call, of each subject. */
void subject_report(spw_dtype type);

#endif
