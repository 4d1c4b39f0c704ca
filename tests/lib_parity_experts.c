/*
 * The parity of a mixture of experts: routing exactly as plain loops here sort it, everything else beside sums in double, on whatever
 * device; and the same bits from run to run. Inputs are numbers that every type holds exactly. What lies behind an array stays.
 */
#include "lib_parity.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

typedef enum logits { DRAWN, FEW_VALUES, EQUAL, STARVED, ASCENDING, WITH_NAN, LOGITS_COUNT } logits;
typedef enum onto { NOTHING, ITSELF, ANOTHER, ONTO_COUNT } onto;

typedef struct mixture {
    uint64_t M, E, k, C;
    logits logits;
    onto onto;
    bool sum_to_one, add, weighted;
    float balance;
    bool sigmoid, biased, factored, root;
    uint64_t tokens;                /* that a table has choices of; 0: there is none */
    float scale;                    /* of weights; 0: 1 */
    float least;                    /* of their sum; 0: as it is without */
    uint64_t groups, group_choices; /* 0: none */
    bool cancel;                    /* terms of combine that give another sum in any other order */
    uint64_t shift;                 /* elements by which arrays of the compute type are off an aligned address */
} mixture;

/* What operations read, then what they write, DLOGITS and Y, which may be both, and sums, which are. */
enum {
    LOGITS,
    BIAS,
    FACTORS,
    TABLE,
    TOKENS,
    X,
    MOVED,
    DY,
    BEFORE,
    DWEIGHTS,
    WEIGHTS,
    CHOICES,
    PLACES,
    PAIRS,
    ENDS,
    SENT,
    DX,
    DOTS,
    PIECES_SENT,
    PIECES_DX,
    PIECES_DOTS,
    SHARES,
    DFACTORS,
    DLOGITS,
    Y,
    Y_DOWN,
    CLOSED_UP,
    CLOSED_DOWN,
    SUM_UP,
    SUM_DOWN,
    SUM_CUT, /* the sum upwards in other pieces */
    COUNT
};

typedef struct array {
    bool act;
    uint64_t n;
    float *in; /* (n) NULL: begins as bytes 0xff */
} array;

enum { GUARD = 64 };

static void *
need(size_t bytes)
{
    void *p = malloc(bytes + 64);
    assert_non_null(p);
    return p;
}

#define FAIL(m, what, ...)                                                                                             \
    fail_msg("experts (%llu rows, %llu of %llu, %llu wide; logits %d, onto %d, sum to one %d, added %d, weighted %d, " \
             "sigmoid %d, biased %d, factored %d, %llu of %llu groups, shift %llu): " what,                            \
             (unsigned long long)(m)->M, (unsigned long long)(m)->k, (unsigned long long)(m)->E,                       \
             (unsigned long long)(m)->C, (m)->logits, (m)->onto, (m)->sum_to_one, (m)->add, (m)->weighted,             \
             (m)->sigmoid, (m)->biased, (m)->factored, (unsigned long long)(m)->group_choices,                         \
             (unsigned long long)(m)->groups, (unsigned long long)(m)->shift, __VA_ARGS__)

/* ---------------------------------------------------------------- the reference */

static float
logit_of(const mixture *m, uint64_t row, uint64_t e)
{
    static const float few[] = {-1.0f, -0.0f, 0.0f, 1.0f};
    uint32_t r[4];
    spw_philox(31 + m->M + m->E, m->k, row * m->E + e, r);
    if (m->logits == WITH_NAN && row % 3 == 1 && e == row * 5 % m->E)
        return row % 2 ? -NAN : NAN;
    if (m->logits == STARVED && e % 3 == 1)
        return -INFINITY;
    if (m->logits == FEW_VALUES)
        return few[r[0] % 4];
    if (m->logits == EQUAL)
        return 0.5f;
    if (m->logits == ASCENDING) /* in steps that bf16 has, and that a sigmoid in fp32 keeps apart */
        return ((float)e - (m->E > 256 ? 256.0f : 0.0f)) / 32.0f;
    return (float)(r[0] % 256) / 32.0f - 4.0f;
}

static double
logistic(double x)
{
    return 1 / (1 + exp(-x));
}

/* A term of an expert's bias, which is no number of 16 bits. */
static float
bias_of(uint64_t part, uint64_t e)
{
    static const float units[SPW_TERMS] = {0x1p-3f, 0x1p-11f, 0x1p-19f, 0};
    uint32_t r[4];
    spw_philox(5, part, e, r);
    return (float)(r[0] % 64) * units[part];
}

/* Some are 0, some below it. */
static float
factor_of(const mixture *m, uint64_t e)
{
    uint32_t r[4];
    spw_philox(6, m->E, e, r);
    return !m->factored ? 1.0f : e % 5 == 3 ? 0.0f : (float)(r[0] % 256) / 64.0f - 1.5f;
}

/* The term of an expert that a token has, of which the first ones are often the same. */
static float
table_of(const mixture *m, uint64_t token, uint64_t j, uint64_t part)
{
    const uint64_t e = (token * 7 + (j / 2) * (1 + token % 3) + (j % 2) * (token % 5)) % m->E;
    return part == 0 ? (float)(e / 256 * 256) : part == 1 ? (float)(e % 256) : 0.0f;
}

static uint64_t
token_of(const mixture *m, uint64_t row)
{
    return (row * row + 3) % m->tokens;
}

static bool
above_key(double a, double b)
{
    return a > b || (isnan(a) && !isnan(b));
}

/* How many of n others come before the one at index i, or enough. */
static uint64_t
before(const double *keys, uint64_t n, uint64_t i, uint64_t enough)
{
    uint64_t count = 0;
    for (uint64_t other = 0; other < n && count < enough; other++)
        count += above_key(keys[other], keys[i]) || (!above_key(keys[i], keys[other]) && other < i);
    return count;
}

/* The best of a group, or the sum of its best two. */
static double
worth_of(const mixture *m, const double *keys, uint64_t n)
{
    double worth = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (before(keys, n, i, 2) < (m->sigmoid ? 2 : 1))
            worth += keys[i];
    }
    return worth;
}

/* What a row chooses by. */
static void
find_keys(const mixture *m, const float *l, double *keys)
{
    uint64_t each = m->groups > 0 ? m->E / m->groups : m->E;
    double worth[SPW_EXPERTS_MAX], all = 0;
    for (uint64_t e = 0; e < m->E; e++)
        all += exp((double)l[e]);
    for (uint64_t e = 0; e < m->E; e++) {
        keys[e] = m->root      ? sqrt(log1p(exp((double)l[e])))
                  : m->sigmoid ? logistic((double)l[e])
                  : m->biased  ? exp((double)l[e]) / all
                               : (double)l[e];
        for (uint64_t part = 0; part < SPW_TERMS && m->biased; part++)
            keys[e] += (double)bias_of(part, e);
    }
    for (uint64_t g = 0; g < m->groups; g++)
        worth[g] = worth_of(m, keys + g * each, each);
    for (uint64_t e = 0; e < m->E && m->groups > 0; e++)
        keys[e] = before(worth, m->groups, e / each, m->groups) < m->group_choices ? keys[e] : -INFINITY;
}

/* An expert is chosen that fewer are before than are chosen, lower ones first; a pair's place is as many as come before it. */
static void
route(const mixture *m, const float *x, int32_t *choices, int32_t *places, int32_t *pairs, int32_t *ends)
{
    int32_t place = 0;
    for (uint64_t row = 0; row < m->M; row++) {
        double keys[SPW_EXPERTS_MAX];
        uint64_t n = 0;
        for (uint64_t e = 0; m->tokens > 0 && e < m->E; e++)
            for (uint64_t j = 0; j < m->k; j++)
                if ((uint64_t)(table_of(m, token_of(m, row), j, 0) + table_of(m, token_of(m, row), j, 1)) == e)
                    choices[row * m->k + n++] = (int32_t)e;
        if (m->tokens > 0)
            continue;
        find_keys(m, x + row * m->E, keys);
        for (uint64_t e = 0; e < m->E; e++) {
            if (before(keys, m->E, e, m->k) < m->k)
                choices[row * m->k + n++] = (int32_t)e;
        }
    }
    for (uint64_t e = 0; e < m->E; e++) {
        for (uint64_t i = 0; i < m->M * m->k; i++)
            if (choices[i] == (int32_t)e) {
                places[i] = place;
                pairs[place++] = (int32_t)i;
            }
        ends[e] = place;
    }
}

static double
scale_of(const mixture *m)
{
    return m->scale > 0 ? (double)m->scale : 1;
}

/* A NaN is above all. */
static double
greatest(const mixture *m, const float *l)
{
    double max = (double)l[0];
    for (uint64_t e = 1; e < m->E; e++)
        max = above_key((double)l[e], max) ? (double)l[e] : max;
    return max;
}

/* The probability of an expert before sums: exp(logit - the greatest), or its sigmoid. */
static double
part_of(const mixture *m, double logit, double max)
{
    return m->root ? sqrt(log1p(exp(logit))) : m->sigmoid ? logistic(logit) : exp(logit - max);
}

/* What a weight is divided by: the sum over all experts or over the chosen ones; of sigmoids that or nothing. */
static double
divisor(const mixture *m, const float *l, const int32_t *choices)
{
    double sum = !m->sigmoid ? 0 : m->least > 0 ? (double)m->least : (double)SPW_WEIGHTS_LEAST;
    if (m->sigmoid && !m->sum_to_one)
        return 1;
    for (uint64_t i = 0; i < (m->sum_to_one ? m->k : m->E); i++)
        sum += part_of(m, (double)l[m->sum_to_one ? (uint64_t)choices[i] : i], greatest(m, l));
    return sum;
}

/* ---------------------------------------------------------------- on the device */

static float
number(uint64_t stream, uint64_t i)
{
    uint32_t r[4];
    spw_philox(77, stream, i, r);
    return (float)(r[0] % 512) / 256.0f - 1.0f;
}

/* Three terms of k, somewhere in the row, whose sum is 0, 0 or small in their order and something else in another. */
static float
cancelling(const mixture *m, uint64_t j, uint64_t c)
{
    static const float terms[3][3] = {
        {0x1p15f, 0x1p-10f, -0x1p15f}, {0x1p-10f, 0x1p15f, -0x1p15f}, {0x1p15f, -0x1p15f, 0x1p-10f}};
    uint64_t first = c / 3 % (m->k - 2);
    return j >= first && j < first + 3 ? terms[c % 3][j - first] : 0.0f;
}

static void
draw(const mixture *m, array *a, const int32_t *pairs)
{
    uint64_t pair_count = m->M * m->k;
    a[LOGITS] = (array){true, m->M * m->E, NULL};
    a[BIAS] = (array){true, SPW_TERMS * m->E, NULL};
    a[FACTORS] = (array){true, m->E, NULL};
    a[TABLE] = (array){true, m->tokens * m->k * SPW_TERMS, NULL};
    a[TOKENS] = (array){false, m->tokens > 0 ? m->M : 0, NULL};
    a[X] = a[DY] = a[BEFORE] = a[Y] = a[Y_DOWN] = a[CLOSED_UP] = a[CLOSED_DOWN] = (array){true, m->M * m->C, NULL};
    a[MOVED] = a[SENT] = a[DX] = (array){true, pair_count * m->C, NULL};
    a[DWEIGHTS] = a[WEIGHTS] = a[CHOICES] = a[PLACES] = a[PAIRS] = a[DOTS] = (array){false, pair_count, NULL};
    a[ENDS] = (array){false, m->E, NULL};
    a[PIECES_SENT] = a[PIECES_DX] = a[SENT];
    a[PIECES_DOTS] = a[SHARES] = a[DOTS];
    a[DFACTORS] = a[ENDS];
    a[SUM_UP] = a[SUM_DOWN] = a[SUM_CUT] = (array){false, m->M * m->C, NULL};
    a[DLOGITS] = a[LOGITS];
    for (int k = 0; k < COUNT; k++) {
        if (k > DWEIGHTS && k < SUM_UP && k != DFACTORS && !(k == DLOGITS && m->add) &&
            !(k >= Y && m->onto == ITSELF && k != CLOSED_UP))
            continue;
        a[k].in = need(a[k].n * 4);
        for (uint64_t i = 0; i < a[k].n; i++)
            a[k].in[i] = k < Y ? number((uint64_t)k, i) : m->onto == NOTHING || k == SUM_DOWN ? 0 : a[BEFORE].in[i];
    }
    for (uint64_t i = 0; i < a[LOGITS].n; i++)
        a[LOGITS].in[i] = logit_of(m, i / m->E, i % m->E);
    for (uint64_t i = 0; i < a[BIAS].n; i++)
        a[BIAS].in[i] = bias_of(i % SPW_TERMS, i / SPW_TERMS);
    for (uint64_t i = 0; i < a[TABLE].n; i++)
        a[TABLE].in[i] = table_of(m, i / SPW_TERMS / m->k, i / SPW_TERMS % m->k, i % SPW_TERMS);
    for (uint64_t i = 0; i < a[TOKENS].n; i++) {
        int32_t token = (int32_t)token_of(m, i);
        memcpy(&a[TOKENS].in[i], &token, sizeof token);
    }
    for (uint64_t i = 0; i < a[FACTORS].n; i++)
        a[FACTORS].in[i] = factor_of(m, i);
    for (uint64_t i = 0; m->cancel && i < a[MOVED].n; i++)
        a[MOVED].in[i] = cancelling(m, (uint64_t)pairs[i / m->C] % m->k, i % m->C);
}

/* Places in pieces of so many, the first one shorter, upwards or downwards. */
static void
sum_pieces(const mixture *m, spw_gpu_queue *q, float *sum, char *moved, uint64_t row_bytes, const spw_routing *r,
           uint64_t each, bool down)
{
    uint64_t n = m->M * m->k;
    if (n == 0)
        spw_gpu_combine_piece(q, sum, (act *)moved, r, m->weighted, down, 0, 0, m->C);
    for (uint64_t done = 0, rows; done < n; done += rows) {
        rows = done == 0 ? (each + 1) / 2 : each;
        rows = n - done < rows ? n - done : rows;
        uint64_t first = down ? n - done - rows : done;
        spw_gpu_combine_piece(q, sum, (act *)(moved + first * row_bytes), r, m->weighted, down, first, rows, m->C);
    }
}

static void
run_pieces(const mixture *m, spw_gpu_queue *q, void **p, spw_dtype type, const spw_routing *r)
{
    uint64_t n = m->M * m->k, row_bytes = m->C * spw_dtype_bytes(type), each = n / 5 + 1;
    for (uint64_t first = 0, rows; first < n; first += rows) {
        uint64_t at = first * row_bytes;
        rows = n - first < each ? n - first : each;
        spw_gpu_dispatch_piece(q, (char *)p[PIECES_SENT] + at, p[X], r, first, rows, m->C);
        spw_gpu_combine_backward_piece(q, (char *)p[PIECES_DX] + at, first == 0 ? p[PIECES_DOTS] : NULL, p[DY],
                                       (char *)p[MOVED] + at, r, first, rows, m->C);
        if (first > 0) /* one at a time */
            spw_gpu_combine_backward_piece(q, NULL, p[PIECES_DOTS], p[DY], (char *)p[MOVED] + at, r, first, rows, m->C);
    }
    sum_pieces(m, q, p[SUM_UP], p[MOVED], row_bytes, r, each, false);
    sum_pieces(m, q, p[SUM_DOWN], p[MOVED], row_bytes, r, n < 200 ? 1 : each, true);
    sum_pieces(m, q, p[SUM_CUT], p[MOVED], row_bytes, r, n < 200 ? 3 : n / 2, false);
    spw_gpu_close_sums(q, p[CLOSED_UP], p[SUM_UP], NULL, m->M, m->C);
    spw_gpu_close_sums(q, p[CLOSED_DOWN], p[SUM_DOWN],
                       m->onto == NOTHING ? NULL : p[m->onto == ITSELF ? CLOSED_DOWN : BEFORE], m->M, m->C);
}

static void
run(const mixture *m, spw_gpu_queue *q, void **p, spw_dtype type)
{
    spw_routing r = {.weights = p[WEIGHTS],
                     .shares = m->factored ? p[SHARES] : NULL,
                     .choices = p[CHOICES],
                     .places = p[PLACES],
                     .pairs = p[PAIRS],
                     .ends = p[ENDS],
                     .M = m->M,
                     .k = m->k,
                     .E = m->E};
    spw_routing_rule rule = {.sum_to_one = m->sum_to_one,
                             .sigmoid = m->sigmoid,
                             .scale = (float)scale_of(m),
                             .least = m->least,
                             .bias = m->biased ? p[BIAS] : NULL,
                             .factors = m->factored ? p[FACTORS] : NULL,
                             .root = m->root,
                             .table = m->tokens > 0 ? p[TABLE] : NULL,
                             .tokens = m->tokens > 0 ? p[TOKENS] : NULL,
                             .groups = m->groups,
                             .group_choices = m->group_choices};
    spw_gpu_route(q, &r, p[LOGITS], &rule);
    spw_gpu_route_backward(q, p[DLOGITS], p[DWEIGHTS], p[LOGITS], &r, &rule, m->balance, m->add ? SPW_OP_ACC_DX : 0);
    memset(&rule, 0, sizeof rule);
    if (m->factored)
        spw_gpu_factors_backward(q, p[DFACTORS], p[DWEIGHTS], &r);
    spw_gpu_dispatch(q, p[SENT], p[X], &r, m->C);
    for (int k = Y; k <= Y_DOWN; k++)
        spw_gpu_combine(q, p[k], m->onto == NOTHING ? NULL : p[m->onto == ITSELF ? k : BEFORE], p[MOVED], &r,
                        m->weighted, k == Y_DOWN, m->C);
    if (m->add) { /* in two calls, of which each makes one */
        spw_gpu_combine_backward(q, p[DX], NULL, p[DY], NULL, &r, m->C);
        spw_gpu_combine_backward(q, NULL, p[DOTS], p[DY], p[MOVED], &r, m->C);
    } else {
        spw_gpu_combine_backward(q, p[DX], p[DOTS], p[DY], p[MOVED], &r, m->C);
    }
    run_pieces(m, q, p, type, &r);
    memset(&r, 0, sizeof r); /* the caller's again */
}

/* out[k] gets the bytes of array k afterwards. */
static void
apply(const parity *p, const mixture *m, const array *a, void **out)
{
    spw_dtype type = spw_gpu_get_info(p->gpu)->compute_dtype;
    void *device[COUNT], *at[COUNT];
    spw_gpu_queue *q = NULL;
    spw_error err = {0};
    assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_COMPUTE, &err), SPW_OK);
    for (int k = 0; k < COUNT; k++) {
        uint64_t width = a[k].act ? spw_dtype_bytes(type) : 4, skip = a[k].act ? m->shift * width : 0;
        unsigned char *host = need(a[k].n * width + GUARD);
        memset(host, 0xff, a[k].n * width + GUARD);
        if (a[k].in != NULL)
            spw_convert(host, a[k].act ? type : SPW_F32, a[k].in, SPW_F32, a[k].n);
        assert_int_equal(spw_gpu_alloc(p->gpu, &device[k], a[k].n * width + GUARD + skip, &err), SPW_OK);
        at[k] = (char *)device[k] + skip;
        spw_gpu_write_bytes(q, at[k], host, a[k].n * width + GUARD);
        free(host);
    }
    run(m, q, at, type);
    for (int k = 0; k < COUNT; k++) {
        uint64_t bytes = a[k].n * (a[k].act ? spw_dtype_bytes(type) : 4);
        spw_gpu_read_bytes(q, out[k], at[k], bytes + GUARD);
        for (int i = 0; i < GUARD; i++)
            if (((unsigned char *)out[k])[bytes + (uint64_t)i] != 0xff)
                FAIL(m, "array %d goes on behind its end", k);
    }
    if (spw_gpu_check(p->gpu, &err) != SPW_OK)
        FAIL(m, "%s", err.message);
    for (int k = 0; k < COUNT; k++)
        spw_gpu_free(p->gpu, device[k]);
    spw_gpu_queue_destroy(q);
}

/* ---------------------------------------------------------------- side by side */

static void
check(const mixture *m, const char *what, uint64_t i, float got, double want, double error)
{
    if ((isnan(want) && isnan(got)) || (double)got == want)
        return;
    if (!(fabs((double)got - want) <= error))
        FAIL(m, "%s, element %llu is %.9g, not %.9g by %.3g", what, (unsigned long long)i, (double)got, want, error);
}

/* Sums in fp32 are right to 2e-6 of what their terms amount to; then a type rounds once. */
static double
error_of(spw_dtype type, double want, double terms)
{
    static const double unit[SPW_DTYPE_COUNT] = {0x1p-24, 0x1p-8, 0x1p-11};
    return unit[type] * fabs(want) + 2e-6 * terms + (type == SPW_F16 ? 0x1p-25 : 1e-37);
}

/* What balance gives an expert's probability: more, the more pairs it has. */
static double
pull_of(const mixture *m, const int32_t *ends, uint64_t e)
{
    return m->balance == 0 ? 0 : (double)m->balance * (double)(ends[e] - (e > 0 ? ends[e - 1] : 0));
}

/* Sums of pairs, onto what was there; without factors nobody touches it. */
static void
check_factors(const mixture *m, float *const *got, const array *a, const int32_t *choices)
{
    double *sums = need(m->E * sizeof *sums), *terms = need(m->E * sizeof *terms);
    for (uint64_t e = 0; e < m->E; e++)
        terms[e] = fabs(sums[e] = (double)a[DFACTORS].in[e]);
    for (uint64_t row = 0; row < m->M && m->factored; row++) {
        const float *l = a[LOGITS].in + row * m->E;
        const int32_t *chosen = choices + row * m->k;
        double all = divisor(m, l, chosen);
        for (uint64_t j = 0; j < m->k; j++) {
            double share = part_of(m, (double)l[chosen[j]], greatest(m, l)) / all * scale_of(m);
            double term = share * (double)a[DWEIGHTS].in[row * m->k + j];
            check(m, "shares", row * m->k + j, got[SHARES][row * m->k + j], share, error_of(SPW_F32, share, share));
            sums[chosen[j]] += term;
            terms[chosen[j]] += fabs(term);
        }
    }
    for (uint64_t e = 0; e < m->E; e++)
        check(m, "dfactors", e, got[DFACTORS][e], sums[e], error_of(SPW_F32, sums[e], terms[e]));
    free(sums);
    free(terms);
}

static void
check_routing(const mixture *m, float *const *got, void *const *raw, const array *a, int32_t *const *want,
              spw_dtype type)
{
    for (int k = CHOICES; k <= ENDS; k++)
        for (uint64_t i = 0; i < a[k].n; i++)
            if (((const int32_t *)raw[k])[i] != want[k][i])
                FAIL(m, "array %d, element %llu is %d, not %d", k, (unsigned long long)i, ((const int32_t *)raw[k])[i],
                     want[k][i]);
    for (uint64_t row = 0; row < m->M; row++) {
        const float *l = a[LOGITS].in + row * m->E, *dw = a[DWEIGHTS].in + row * m->k;
        const int32_t *choices = want[CHOICES] + row * m->k;
        double mean = 0, terms = 0, d[SPW_EXPERTS_MAX] = {0}, max = greatest(m, l), scale = scale_of(m);
        double all = divisor(m, l, choices), of_all = 0, pull = 0, p_all;
        for (uint64_t e = 0; e < m->E; e++)
            of_all += part_of(m, (double)l[e], max);
        for (uint64_t e = 0; e < m->E; e++)
            pull += part_of(m, (double)l[e], max) / of_all * pull_of(m, want[ENDS], e);
        for (uint64_t j = 0; j < m->k; j++) {
            double p = part_of(m, (double)l[choices[j]], max) / all, f = (double)factor_of(m, (uint64_t)choices[j]);
            check(m, "weights", row * m->k + j, got[WEIGHTS][row * m->k + j], p * scale * f,
                  error_of(SPW_F32, p * scale * f, p * scale * fabs(f)));
            mean += p * (double)dw[j] * f;
            terms += p * fabs((double)dw[j] * f);
            d[choices[j]] += (double)dw[j] * f;
        }
        if (m->sigmoid && !m->sum_to_one)
            mean = terms = 0;
        for (uint64_t e = 0; e < m->E; e++) {
            double p = part_of(m, (double)l[e], max) / all, old = m->add ? (double)a[DLOGITS].in[row * m->E + e] : 0, g;
            double slope = m->sigmoid ? 1 - logistic((double)l[e]) : 1, chosen = 0;
            if (m->root)
                slope = l[e] < -30 ? 0.5 : logistic((double)l[e]) / (2 * log1p(exp((double)l[e])));
            for (uint64_t j = 0; j < m->k; j++)
                chosen += choices[j] == (int32_t)e;
            if (chosen == 0 && !m->sum_to_one && !m->sigmoid)
                chosen = 1;
            g = old + (chosen > 0 ? p * scale * slope * (d[e] - chosen * mean) : 0);
            p_all = m->balance == 0 ? 0 : part_of(m, (double)l[e], max) / of_all;
            g += m->balance == 0 ? 0 : p_all * slope * (pull_of(m, want[ENDS], e) - pull);
            check(m, "dlogits", row * m->E + e, got[DLOGITS][row * m->E + e], g,
                  error_of(type, g,
                           p * scale * (fabs(d[e]) + (1 + chosen) * terms) + fabs(old) +
                               p_all * (pull_of(m, want[ENDS], e) + (m->balance == 0 ? 0 : pull))));
        }
    }
}

/* What an element of all rows gets of its row's choices, in fp64 and, upwards onto what was before and downwards, in fp32. */
typedef struct combined {
    double before, sum, terms;
    float up, down; /* weights that cancel are powers of two: no product rounds */
} combined;

static combined
combine(const mixture *m, float *const *got, const array *a, const int32_t *places, uint64_t i)
{
    const float before = m->onto == NOTHING ? 0 : a[BEFORE].in[i];
    combined c = {.before = (double)before, .terms = fabs((double)before), .up = before};
    for (uint64_t j = 0; j < m->k; j++) {
        for (int way = 0; way < 2; way++) {
            uint64_t pair = i / m->C * m->k + (way == 0 ? j : m->k - 1 - j);
            float w = m->weighted ? got[WEIGHTS][pair] : 1.0f;
            float x = a[MOVED].in[(uint64_t)places[pair] * m->C + i % m->C];
            *(way == 0 ? &c.up : &c.down) += w * x;
            c.sum += way == 0 ? (double)w * (double)x : 0;
            c.terms += way == 0 ? fabs((double)w * (double)x) : 0;
        }
    }
    return c;
}

static void
check_rows(const mixture *m, float *const *got, const array *a, const int32_t *places, spw_dtype type)
{
    for (uint64_t i = 0; i < m->M * m->k; i++) {
        uint64_t row = i / m->k, at = (uint64_t)places[i] * m->C;
        double w = (double)got[WEIGHTS][i], dot = 0, terms = 0;
        for (uint64_t c = 0; c < m->C; c++) {
            double dy = (double)a[DY].in[row * m->C + c], product = dy * (double)a[MOVED].in[at + c];
            check(m, "dispatched", at + c, got[SENT][at + c], (double)a[X].in[row * m->C + c], 0);
            check(m, "dx", at + c, got[DX][at + c], w * dy, error_of(type, w * dy, 0));
            dot += product;
            terms += fabs(product);
        }
        check(m, "dweights", i, got[DOTS][i], dot, error_of(SPW_F32, dot, terms));
    }
    for (uint64_t i = 0; i < m->M * m->C; i++) {
        const combined c = combine(m, got, a, places, i);
        const double error = m->cancel ? 0 : error_of(type, c.before + c.sum, c.terms);
        check(m, "combined", i, got[Y][i], m->cancel ? (double)c.up : c.before + c.sum, error);
        check(m, "combined downwards", i, got[Y_DOWN][i], m->cancel ? (double)c.down : c.before + c.sum, error);
    }
}

/* Sums of all pieces are those of one, and closed they are what combine gives. */
static void
check_pieces(const mixture *m, float *const *got, const array *a, const int32_t *places)
{
    if (memcmp(got[SUM_UP], got[SUM_CUT], m->M * m->C * sizeof(float)) != 0)
        FAIL(m, "sums depend on %s", "pieces");
    if (memcmp(got[CLOSED_UP], got[Y], m->M * m->C * sizeof(float)) != 0)
        FAIL(m, "closed sums are not what combine gives%s", "");
    if (memcmp(got[CLOSED_DOWN], got[Y_DOWN], m->M * m->C * sizeof(float)) != 0)
        FAIL(m, "closed sums are not what combine gives%s", " downwards");
    for (uint64_t i = 0; i < m->M * m->k * m->C; i++) {
        check(m, "dispatched in pieces", i, got[PIECES_SENT][i], (double)got[SENT][i], 0);
        check(m, "dx in pieces", i, got[PIECES_DX][i], (double)got[DX][i], 0);
    }
    for (uint64_t i = 0; i < m->M * m->k; i++)
        check(m, "dweights in pieces", i, got[PIECES_DOTS][i], (double)got[DOTS][i], 0);
    for (uint64_t i = 0; i < m->M * m->C; i++) {
        const combined c = combine(m, got, a, places, i);
        check(m, "summed upwards", i, got[SUM_UP][i], m->cancel ? (double)c.up : c.before + c.sum,
              m->cancel ? 0 : error_of(SPW_F32, c.before + c.sum, c.terms));
        check(m, "summed downwards", i, got[SUM_DOWN][i], m->cancel ? (double)c.down : c.sum,
              m->cancel ? 0 : error_of(SPW_F32, c.sum, c.terms));
    }
}

static void
examine(const parity *p, const mixture *m)
{
    static const char *const twice[] = {"", "", NULL};
    const char *const *orders = p->orders != NULL ? p->orders : twice;
    spw_dtype type = spw_gpu_get_info(p->gpu)->compute_dtype;
    int32_t *want[COUNT] = {NULL};
    void *first[COUNT], *again[COUNT];
    float *got[COUNT], *l = need(m->M * m->E * 4);
    array a[COUNT] = {{0}};
    for (int k = CHOICES; k <= ENDS; k++)
        want[k] = need((k == ENDS ? m->E : m->M * m->k) * 4);
    for (uint64_t i = 0; i < m->M * m->E; i++)
        l[i] = logit_of(m, i / m->E, i % m->E);
    route(m, l, want[CHOICES], want[PLACES], want[PAIRS], want[ENDS]);
    draw(m, a, want[PAIRS]);
    for (int k = 0; k < COUNT; k++) {
        first[k] = need(a[k].n * 4 + GUARD);
        again[k] = need(a[k].n * 4 + GUARD);
        got[k] = need(a[k].n * 4);
    }
    for (int turn = 0; orders[turn] != NULL; turn++) {
        setenv("SPW_EMULATE_ORDER", orders[turn], 1);
        apply(p, m, a, turn == 0 ? first : again);
        for (int k = 0; k < COUNT && turn > 0; k++)
            if (memcmp(first[k], again[k], a[k].n * (a[k].act ? spw_dtype_bytes(type) : 4)) != 0)
                FAIL(m, "array %d has other bits in the run \"%s\"", k, orders[turn]);
    }
    setenv("SPW_EMULATE_ORDER", "", 1);
    for (int k = 0; k < COUNT; k++)
        spw_convert(got[k], SPW_F32, first[k], a[k].act ? type : SPW_F32, a[k].n);
    for (int k = 0; k <= DWEIGHTS; k++)
        for (uint64_t i = 0; i < a[k].n; i++)
            check(m, "an input", i, got[k][i], (double)a[k].in[i], 0);
    check_routing(m, got, first, a, want, type);
    check_factors(m, got, a, want[CHOICES]);
    check_rows(m, got, a, want[PLACES], type);
    check_pieces(m, got, a, want[PLACES]);
    for (int k = 0; k < COUNT; k++) {
        free(first[k]);
        free(again[k]);
        free(got[k]);
        free(want[k]);
        free(a[k].in);
    }
    free(l);
}

/* Of many experts a GPU takes all ways, others some of each: together, all; groups, each time. */
static bool
fewer(const parity *p, uint64_t experts)
{
    return !p->large && experts > 100;
}

void
parity_experts(const parity *p)
{
    static const uint64_t sizes[][4] = {
        {0, 8, 2, 8},        {1, 1, 1, 1},       {7, 3, 3, 40},       {300, 8, 2, 130},  {40, 64, 8, 1024},
        {60, 128, 8, 40},    {5000, 8, 2, 1},    {9, 16, 16, 264},    {1, 128, 7, 24},   {2100, 1, 1, 3},
        {40, 256, 16, 8},    {700, 64, 1, 8},    {50, 384, 8, 40},    {80, 512, 16, 8},  {70000, 128, 8, 16},
        {300, 256, 8, 2048}, {70, 32, 4, 16384}, {30000, 384, 8, 16}, {600, 512, 16, 8},
    };
    static const uint64_t grouped[][5] = {
        {7, 8, 2, 4, 1},    {60, 256, 8, 8, 4},   {33, 96, 6, 3, 2}, {20, 64, 4, 64, 9},
        {40, 384, 8, 8, 4}, {3, 512, 4, 512, 70}, {9, 24, 3, 2, 1},  {11, 40, 3, 1, 1},
    };
    static const uint64_t hashed[][4] = {
        {1, 2, 1, 1}, {7, 8, 2, 5}, {70, 300, 6, 40}, {20, 6, 6, 3}, {40, 16, 4, 0}, {9, 384, 8, 0},
    };
    for (size_t i = 0; i < (p->large ? 19 : 14); i++)
        for (unsigned f = fewer(p, sizes[i][1]) ? (unsigned)i % 3 : 0; f < (sizes[i][0] > 1000 ? 1 : 6);
             f += fewer(p, sizes[i][1]) || i > 13 ? 3 : 1)
            examine(p, &(mixture){.M = sizes[i][0],
                                  .E = sizes[i][1],
                                  .k = sizes[i][2],
                                  .C = sizes[i][3],
                                  .logits = (logits)((i + f) % LOGITS_COUNT),
                                  .onto = (onto)(f % ONTO_COUNT),
                                  .sum_to_one = f % 2 != 0,
                                  .add = f & 2,
                                  .weighted = f != 1,
                                  .balance = f % 3 == 2 ? 0.01f : 0.0f,
                                  .biased = i < 14 && (i + f) % 4 == 3,
                                  .factored = (i + f) % 3 == 0,
                                  .shift = f == 3});
    for (size_t i = 0; i < sizeof grouped / sizeof grouped[0]; i++)
        for (unsigned f = fewer(p, grouped[i][1]) ? (unsigned)i + 3 : 0; f < 12; f += fewer(p, grouped[i][1]) ? 5 : 1)
            examine(p, &(mixture){.M = grouped[i][0],
                                  .E = grouped[i][1],
                                  .k = grouped[i][2],
                                  .C = 8,
                                  .logits = (logits)((i + f) % LOGITS_COUNT),
                                  .sum_to_one = f % 2 != 0,
                                  .add = f & 2,
                                  .weighted = true,
                                  .balance = f % 3 == 2 ? 0.01f : 0.0f,
                                  .sigmoid = f % 4 != 3,
                                  .biased = f % 4 == 0 || f % 4 == 1 || (f % 4 == 3 && i % 2 == 0),
                                  .factored = (i + f) % 3 == 1,
                                  .scale = f % 3 == 0 ? 0 : 2.5f,
                                  .least = f % 4 == 1 ? 0.25f : 0,
                                  .groups = f % 5 == 0 ? 0 : grouped[i][3],
                                  .group_choices = f % 5 == 0 ? 0 : grouped[i][4]});
    for (uint64_t i = 0; i < sizeof hashed / sizeof hashed[0]; i++)
        for (unsigned f = 0; f < 4; f++)
            examine(p, &(mixture){.M = hashed[i][0],
                                  .E = hashed[i][1],
                                  .k = hashed[i][2],
                                  .C = 8,
                                  .logits = (logits)((i + f) % LOGITS_COUNT),
                                  .sum_to_one = f != 2,
                                  .weighted = true,
                                  .balance = f == 1 ? 0.01f : 0.0f,
                                  .sigmoid = true,
                                  .root = f != 3,
                                  .biased = f < 2 && hashed[i][3] == 0,
                                  .scale = 1.5f,
                                  .tokens = hashed[i][3]});
    for (uint64_t k = 3; k <= 11; k++)
        examine(p, &(mixture){.M = 5,
                              .E = 16,
                              .k = k,
                              .C = 88,
                              .logits = k == 4 || k == 8 ? EQUAL : DRAWN,
                              .sum_to_one = true,
                              .weighted = k == 4 || k == 8, /* by 1 / k */
                              .cancel = true});
}
