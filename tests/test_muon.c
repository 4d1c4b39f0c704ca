/*
 * Muon: its two halves on the CPU and what comes between on the device, each against the formulas in double precision; and trainings in
 * which units are updated in two halves, in all placements, with the same bits.
 */
#include "cpu_adam_internal.h"
#include "lib_parity.h"
#include "lib_random.h"
#include "lib_rig.h"
#include "lib_worlds.h"
#include "runtime_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

/* ---------------------------------------------------------------- the halves */

enum { ELEMS = 3 * 4096, CUT = 4096 + 640 };

typedef struct state {
    float weights[ELEMS], record[2 * ELEMS], grad[ELEMS]; /* room for any format */
} state;

static float
draw(uint64_t stream, uint64_t i)
{
    uint32_t r[4];
    spw_philox(stream, 7, i, r);
    return ((float)r[0] / 4294967296.0f - 0.5f) * (float)pow(10, r[1] % 4 - 2.0);
}

static spw_opt_chunk
fill(state *s, spw_state_format format, spw_dtype grad_dtype, uint64_t round)
{
    spw_opt_chunk c = {.format = format,
                       .elems = ELEMS,
                       .weights = s->weights,
                       .record = s->record,
                       .grad = s->grad,
                       .grad_dtype = grad_dtype};
    float block[ELEMS];
    memset(s, 0, sizeof *s);
    for (uint64_t part = 0; part < 3; part++) {
        for (uint64_t i = 0; i < ELEMS; i++)
            block[i] = draw(10 * round + part, i);
        if (part == 2)
            spw_convert(s->grad, grad_dtype, block, SPW_F32, ELEMS);
        else
            spw_state_set(format, &spw_opt_muon, s->weights, s->record, ELEMS, (spw_state_part)part, 0, ELEMS, block);
    }
    return c;
}

static const spw_state_format formats[] = {SPW_STATE_FP32,        SPW_STATE_MIXED,      SPW_STATE_SPLIT,
                                           SPW_STATE_MIXED_F16,   SPW_STATE_SPLIT_BF16, SPW_STATE_SPLIT_INT8,
                                           SPW_STATE_SPLIT24_INT8};
enum { FORMATS = 7 };

static void
read_part(const state *s, spw_state_format f, spw_state_part part, float *out)
{
    spw_state_get(f, &spw_opt_muon, s->weights, s->record, ELEMS, part, 0, ELEMS, out);
}

static spw_opt_coef
prepared(double lr, double decay, double momentum, bool nesterov, double grad_scale)
{
    spw_opt_hp hp = {.lr = lr,
                     .weight_decay = decay,
                     .momentum = momentum,
                     .nesterov = nesterov,
                     .step = 1,
                     .grad_scale = grad_scale};
    spw_opt_coef c;
    assert_int_equal(spw_opt_prepare(&c, &spw_opt_muon, &hp, NULL), SPW_OK);
    return c;
}

/* of: what it is the sum of. */
static void
near(double got, double want, double most, double of)
{
    if (!(fabs(got - want) <= most * of))
        fail_msg("%.9g, not %.9g", got, want);
}

/* How far a momentum may be from m, one of a group of 64 whose largest is top. */
static double
rounding(spw_state_format f, double m, double top)
{
    return spw_state_moment_bytes(f) == 4   ? 0
           : spw_state_moment_bytes(f) == 2 ? fabs(m) / 128
                                            : fabs(m) / 30 + top / 7000;
}

static double
largest_of_group(const double *m)
{
    double top = 0;
    for (int i = 0; i < 64; i++)
        top = fabs(m[i]) > top ? fabs(m[i]) : top;
    return top;
}

/* Two groups with rates of their own, the boundary in the middle of a block. */
static void
test_halves(void **unused)
{
    static state s;
    static float m0[ELEMS], g0[ELEMS], w0[ELEMS], m1[ELEMS], w1[ELEMS], u[ELEMS];
    static double m[ELEMS];
    (void)unused;
    for (int f = 0; f < FORMATS; f++) {
        for (int k = 0; k < 6; k++) {
            const spw_dtype type = k < 2 ? SPW_F32 : k < 4 ? SPW_BF16 : SPW_F16;
            const double ulp = type == SPW_F32 ? 1e-6 : type == SPW_BF16 ? 4e-3 : 5e-4, scale = k % 2 ? 0.25 : 1;
            const double least = type == SPW_F16 ? 3e-8 : 0; /* half of its smallest number */
            const bool nesterov = k != 3;
            spw_opt_coef coef[2] = {prepared(0.02, 0.1, 0.95, nesterov, scale), prepared(0.3, 0, 0.5, nesterov, scale)};
            const spw_opt_range ranges[2] = {{CUT, &coef[0]}, {ELEMS, &coef[1]}};
            spw_opt_chunk c = fill(&s, formats[f], type, (uint64_t)(f * 10 + k));
            double squares[3];
            read_part(&s, formats[f], SPW_PART_MASTER, w0);
            read_part(&s, formats[f], SPW_PART_EXP_AVG, m0);
            spw_convert(g0, SPW_F32, s.grad, type, ELEMS);
            assert_int_equal(spw_opt_momentum(&c, s.grad, ranges, 2, squares), 0);
            read_part(&s, formats[f], SPW_PART_EXP_AVG, m1);
            read_part(&s, formats[f], SPW_PART_MASTER, w1);
            assert_memory_equal(w0, w1, sizeof w0); /* the first half leaves them alone */
            spw_convert(u, SPW_F32, s.grad, type, ELEMS);
            for (int i = 0; i < ELEMS; i++)
                m[i] = m0[i] + (i < CUT ? 0.05 : 0.5) * (g0[i] * scale - m0[i]);
            for (int part = 0; part < 3; part++) {
                double sum = 0;
                for (int i = part * 4096; i < (part + 1) * 4096; i++) {
                    const double mu = i < CUT ? 0.95 : 0.5, g = g0[i] * scale;
                    const double back = type == SPW_F16 ? 1 / scale : 1;
                    const double want = (nesterov ? g + mu * (m[i] - g) : m[i]) * back;
                    const double off = rounding(formats[f], m[i], largest_of_group(m + i / 64 * 64));
                    near(m1[i], m[i], 1, 1e-6 * (fabs(m0[i]) + fabs(g)) + off);
                    near(u[i], want, 1, ulp * (fabs(m0[i]) + fabs(g)) * back + least);
                    sum += want * want;
                }
                near(squares[part], sum, 1e-5, sum);
            }
            spw_opt_step(&c, ranges, 2);
            read_part(&s, formats[f], SPW_PART_MASTER, w1);
            read_part(&s, formats[f], SPW_PART_EXP_AVG, m0);
            assert_memory_equal(m0, m1, sizeof m0); /* the second half leaves it alone */
            for (int i = 0; i < ELEMS; i++) {
                const double lr = i < CUT ? 0.02 : 0.3, decay = i < CUT ? 0.1 : 0;
                const double most = formats[f] == SPW_STATE_SPLIT24_INT8 ? 3.2e-5 : 1e-6; /* masters of 24 bits */
                assert_true(fabs(w1[i] - (w0[i] * (1 - lr * decay) - lr * u[i])) <= most * (fabs(w0[i]) + fabs(u[i])));
            }
        }
    }
}

/* The same bits by every instruction set, and however a chunk is cut. */
static void
test_same_bits(void **unused)
{
    static state a, b;
    (void)unused;
    for (int f = 0; f < FORMATS; f++) {
        for (spw_isa isa = 0; isa < SPW_ISA_COUNT; isa++) {
            const spw_dtype type = f == 3 ? SPW_F16 : f == 0 ? SPW_F32 : SPW_BF16;
            spw_opt_coef coef[2] = {prepared(0.02, 0.1, 0.95, true, 0.5), prepared(0.3, 0, 0.5, true, 0.5)};
            const spw_opt_range ranges[2] = {{CUT, &coef[0]}, {ELEMS, &coef[1]}};
            spw_opt_chunk x = fill(&a, formats[f], type, 5), y = fill(&b, formats[f], type, 5);
            double want[3], got[3];
            if (spw_opt_momentum_isa(SPW_ISA_SCALAR, &x, a.grad, ranges, 2, want, NULL) != SPW_OK || !spw_cpu_has(isa))
                continue;
            for (int part = 0; part < 3; part++) {
                y.begin = (uint64_t)part * 4096;
                y.end = y.begin + 4096;
                if (spw_opt_momentum_isa(isa, &y, b.grad, ranges, 2, got + part, NULL) == SPW_EUNSUPPORTED)
                    goto next;
            }
            assert_memory_equal(want, got, sizeof want);
            assert_memory_equal(&a, &b, sizeof a);
            y.begin = y.end = 0;
            assert_int_equal(spw_opt_step_isa(SPW_ISA_SCALAR, &x, ranges, 2, NULL), SPW_OK);
            assert_int_equal(spw_opt_step_isa(isa, &y, ranges, 2, NULL), SPW_OK);
            assert_memory_equal(&a, &b, sizeof a);
        next:;
        }
    }
}

static void
test_nonfinite(void **unused)
{
    static state s;
    spw_opt_coef coef = prepared(0.02, 0.1, 0.95, true, 1);
    spw_opt_chunk c = fill(&s, SPW_STATE_SPLIT, SPW_F32, 1);
    double squares[3];
    (void)unused;
    s.grad[5] = NAN;
    s.grad[4100] = -INFINITY;
    assert_int_equal(spw_opt_momentum(&c, s.grad, &(spw_opt_range){ELEMS, &coef}, 1, squares), 2);
}

/* ---------------------------------------------------------------- what comes between */

static void
test_orthogonal(void **unused)
{
    parity p = {.large = false};
    (void)unused;
    assert_int_equal(spw_gpu_open(&p.gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 2}, NULL), SPW_OK);
    parity_orthogonal(&p);
    spw_gpu_close(p.gpu);
}

/* ---------------------------------------------------------------- training */

static void
use_muon(rig *r)
{
    tiny_muon(&r->c);
}

static void
use_muon_ahead(rig *r)
{
    use_muon(r);
    snprintf(r->c.run.update_ahead, sizeof r->c.run.update_ahead, "always");
}

static void
use_muon_with_adapters(rig *r)
{
    rig_lora(r);
    use_muon(r);
}

static void
test_everywhere(void **unused)
{
    (void)unused;
    rig_everywhere(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, 0.5, use_muon);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_MIXED, 0, use_muon);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_FP32, 0.5, use_muon_ahead);
    rig_everywhere(SPW_FAMILY_MIXTRAL, SPW_STATE_SPLIT, 0.5, use_muon);
    rig_everywhere(SPW_FAMILY_GPT2, SPW_STATE_SPLIT_BF16, 0.5, use_muon);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT24_INT8, 0.5, use_muon_ahead);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, 0.5, use_muon_with_adapters);
}

static void
test_resumes(void **unused)
{
    (void)unused;
    for (int tier = SPW_TIER_HOST; tier <= SPW_TIER_NVME; tier++) {
        rig_resumes(SPW_STATE_SPLIT, SPW_FAMILY_LLAMA, (spw_tier)tier, use_muon);
        rig_resumes(SPW_STATE_FP32, SPW_FAMILY_GPT2, (spw_tier)tier, use_muon);
        rig_resumes(SPW_STATE_SPLIT_INT8, SPW_FAMILY_GPT2, (spw_tier)tier, use_muon);
    }
}

/* What takes AdamW has its gradients on nvme, the others' are in host memory. */
static void
test_spills(void **unused)
{
    rig a, b;
    (void)unused;
    for (int k = 0; k < 2; k++) {
        rig *r = k ? &b : &a;
        rig_config(r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_NVME);
        use_muon(r);
        r->c.gradient_clipping = 0.5;
        r->c.run.chaos_seed = (uint64_t)k * 7;
        snprintf(r->c.run.gradients, sizeof r->c.run.gradients, k ? "nvme" : "host");
        rig_open(r);
        rig_need(r, spw_engine_init_params(r->e, 7, &r->err));
        rig_train(r, 0, RIG_STEPS);
    }
    assert_int_equal(spw_engine_plan(a.e)->grad_nvme, 0);
    assert_true(spw_engine_plan(b.e)->grad_nvme > 0 && spw_engine_plan(b.e)->grad_host > 0);
    assert_memory_equal(a.losses, b.losses, sizeof a.losses);
    rig_same_state(&a, &b, "spilled");
    rig_remove(&a);
    rig_remove(&b);
}

/* By whoever fills a configuration himself: a file would have been refused before. */
static void
test_refused(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        rig r;
        rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
        use_muon(&r);
        r.c.run.delayed_update = k == 0;
        r.c.optimizer.ns_steps = k == 1 ? 0 : 5;
        assert_int_equal(rig_begin(&r), SPW_ECONFIG);
        assert_non_null(strstr(r.err.message, "Muon with delayed_update"));
        rig_remove(&r);
    }
}

/* Of the layers' matrices all state but one moment's: what is planned; tests/test_traffic.sh counts what the disk sees. */
static void
test_bytes(void **unused)
{
    const spw_tier tiers[] = {SPW_TIER_HOST, SPW_TIER_NVME, SPW_TIER_NVME, SPW_TIER_HOST};
    (void)unused;
    for (int k = 0; k < 4; k++) {
        rig r;
        const spw_plan *p;
        const spw_layout *l;
        uint64_t whole = 0, others = 0, matrices = 0;
        spw_step_result last = {0};
        rig_config(&r, SPW_FAMILY_LLAMA, k == 3 ? SPW_STATE_SPLIT24_INT8 : SPW_STATE_SPLIT, tiers[k]);
        use_muon(&r);
        r.c.gradient_clipping = 0.5;
        r.c.run.grad_dtype = SPW_BF16;
        r.c.run.record_slots = k == 2; /* else as many as hold two units' */
        snprintf(r.c.run.update_ahead, sizeof r.c.run.update_ahead, "never");
        rig_open(&r);
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        for (uint64_t step = 0; step < 3; step++)
            rig_need(&r, rig_step(&r, step, &last));
        p = spw_engine_plan(r.e);
        l = spw_engine_layout(r.e);
        for (uint32_t u = 0; u < l->unit_count; u++)
            *(l->units[u].whole ? &whole : &others) += l->units[u].elems;
        for (uint32_t id = 0; id < l->param_count; id++) {
            const spw_param *q = &r.model->params[id];
            bool inside = strstr(q->name, "layers.") != NULL && q->ndim == 2;
            assert_int_equal(l->units[l->places[id].unit_idx].whole, inside);
            matrices += inside ? q->rows * q->cols : 0;
        }
        assert_true(whole > 0 && others > 0);
        if (k == 3) /* a scale of 16 bits for 64 moments */
            assert_int_equal(p->record_host, whole * 2 + whole / 32 + others * 3 + others / 16);
        else
            assert_int_equal(p->record_host + p->record_nvme, whole * 6 + others * 10);
        assert_int_equal(p->traffic[0].d2h, (whole + others + matrices) * 2);
        assert_int_equal(last.d2h, p->traffic[0].d2h);
        if (tiers[k] == SPW_TIER_NVME) /* with one slot records of the matrices twice */
            assert_int_equal(p->traffic[0].nvme_write, whole * (2 + (uint64_t)k * 6) + others * 12);
        rig_remove(&r);
    }
}

/* Does part `to` take this of part `from`, from where that one puts it, and puts it where nothing else of its own lies? */
static void
check_taken(const spw_layout *l, uint32_t from, uint32_t to, const whole_piece *in, const spw_comm_piece *take)
{
    whole_piece head, tail, other[16];
    spw_comm_piece its_take[16], give[16];
    const uint64_t most = spw__whole_most(l, 0, 2), ends = spw__whole_given(l, 0, 2, from, &head, &tail);
    (void)spw__whole_got(l, 0, 2, from, other, its_take, give);
    assert_int_equal(give[to].bytes, take[from].bytes);
    assert_true(give[to].from + give[to].bytes <= ends);
    if (take[from].bytes == 0)
        return;
    assert_int_equal(give[to].from, take[from].from);
    assert_int_equal(in[from].at, take[from].to);
    assert_true(take[from].to + take[from].bytes <= most);
    assert_true(take[from].to >= spw__whole_given(l, 0, 2, to, &head, &tail));
    for (uint32_t p = 0; p < l->parts; p++)
        assert_true(p == from || take[p].bytes == 0 || take[p].to >= take[from].to + take[from].bytes ||
                    take[p].to + take[p].bytes <= take[from].to);
}

/* Whatever parts and matrices are: a part gets what it lacks of those of which it has something, all of that and nothing else. */
static void
test_pieces(void **unused)
{
    (void)unused;
    for (uint64_t run = 0; run < 300; run++) {
        const uint32_t matrices = 1 + (uint32_t)random_pick(run, 0, 12);
        uint32_t ids[12], first[2] = {0, matrices}, parts = 2 + (uint32_t)random_pick(run, 1, 7);
        spw_place places[12];
        spw_store_unit unit = {.whole = true};
        spw_layout l = {
            .units = &unit, .unit_count = 1, .param_ids = ids, .param_first = first, .places = places, .parts = parts};
        uint64_t at = 0, got = 0, lacks = 0, most = 0;
        for (uint32_t id = 0; id < matrices; id++) {
            const uint64_t elems = 1 + random_pick(run, 2 + id, random_pick(run, 40 + id, 2) ? 9 * 4096 : 60000);
            ids[id] = id;
            places[id] = (spw_place){0, 1, at, elems, elems};
            at += spw_round_up(elems, 4096);
        }
        unit.elems = spw_layout_part(at, parts);
        for (uint32_t part = 0; part < parts; part++) {
            whole_piece in[16];
            spw_comm_piece take[16], give[16];
            const uint64_t bytes = spw__whole_got(&l, 0, 2, part, in, take, give);
            most = bytes > most ? bytes : most;
            unit.first = part * unit.elems;
            for (uint32_t id = 0; id < matrices; id++) {
                uint64_t from, to;
                if (spw__layout_own_whole(&l, id, &from, &to))
                    lacks += places[id].elems - (to - from);
            }
            for (uint32_t p = 0; p < parts; p++) {
                got += in[p].end - in[p].first;
                check_taken(&l, p, part, in, take);
                for (uint64_t i = in[p].first; i < in[p].end; i += 4096) { /* of a matrix that is in this part too */
                    const spw_place *x = &places[spw__layout_from(&l, 0, i)];
                    assert_true(p != part && i / unit.elems == p && x->first <= i);
                    assert_true(x->first < unit.first + unit.elems && x->first + x->elems > unit.first);
                }
            }
        }
        assert_int_equal(got, lacks);
        assert_int_equal(spw__whole_most(&l, 0, 2), most);
    }
}

/* Ranks that have parts of matrices come to what one has that has them all, in every stage and placement to the same bits. */
static void
test_ranks(void **unused)
{
    static const struct {
        const char *name;
        uint32_t stage, slots;
        spw_tier param, optimizer;
        uint64_t chaos;
        uint32_t per_host;
    } variants[] = {{"stage 3, host", 3, 0, SPW_TIER_HOST, SPW_TIER_HOST, 0, 0},
                    {"stage 0", 0, 0, SPW_TIER_DEVICE, SPW_TIER_DEVICE, 0, 0},
                    {"stage 1, records on nvme", 1, 0, SPW_TIER_DEVICE, SPW_TIER_NVME, 0, 0},
                    {"stage 3, a host each", 3, 0, SPW_TIER_HOST, SPW_TIER_HOST, 80, 1},
                    {"stage 3, nvme, one slot", 3, 1, SPW_TIER_NVME, SPW_TIER_NVME, 0, 0},
                    {"stage 3, nvme, 5 slots", 3, 5, SPW_TIER_NVME, SPW_TIER_NVME, 78, 2}, /* records wait in some */
                    {"stage 3, nvme, 8 slots", 3, 8, SPW_TIER_NVME, SPW_TIER_NVME, 79, 0},
                    {"stage 3, nvme, 11 slots", 3, 11, SPW_TIER_NVME, SPW_TIER_NVME, 0, 0},
                    {"stage 3, nvme, delays", 3, 0, SPW_TIER_NVME, SPW_TIER_NVME, 77, 0}};
    outcome *one = outcome_new(), *first = outcome_new(), *other = outcome_new();
    char dir[256];
    (void)unused;
    tiny_dir_make(dir);
    for (int clips = 0; clips < 2; clips++) {
        /* Matrices in two parts; and one that all of a part is within. */
        const uint32_t ranks = clips ? 6 : 2;
        const uint64_t mlp_width = clips ? 3000 : 200;
        const spw_family family = clips ? SPW_FAMILY_GPT2 : SPW_FAMILY_LLAMA;
        spw_config c;
        ranks_config(&c, SPW_STATE_FP32);
        tiny_muon(&c);
        c.gradient_clipping = clips ? 0.5 : 0;
        memset(one, 0, sizeof *one);
        world_run(
            &(world){.ranks = 1, .steps = STEPS, .config = &c, .family = family, .mlp_width = mlp_width, .out = one});
        for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
            outcome *out = i == 0 ? first : other;
            char what[80];
            if (SANITIZED && i % 2 == 1)
                continue;
            ranks_config(&c, SPW_STATE_FP32);
            tiny_muon(&c);
            ranks_use_dir(&c, dir);
            c.gradient_clipping = clips ? 0.5 : 0;
            c.zero.stage = variants[i].stage;
            c.zero.offload_param = variants[i].param;
            c.zero.offload_optimizer = variants[i].optimizer;
            c.run.record_slots = variants[i].slots;
            c.run.chaos_seed = variants[i].chaos;
            snprintf(what, sizeof what, "Muon on %u ranks, %s", ranks, variants[i].name);
            memset(out, 0, sizeof *out);
            world_run(&(world){.ranks = ranks,
                               .steps = STEPS,
                               .config = &c,
                               .family = family,
                               .mlp_width = mlp_width,
                               .per_host = variants[i].per_host,
                               .out = out});
            if (i == 0)
                outcome_within(one, out, 1e-5, what);
            else
                outcome_same(first, out, what);
            for (uint32_t r = 0; r < ranks; r++) {
                assert_int_equal(out->reduce[r], STEPS * out->plan[r].reduced.all);
                assert_int_equal(out->far_reduce[r], STEPS * out->plan[r].reduced.far);
            }
        }
    }
    tiny_dir_remove(dir);
    outcome_free(one);
    outcome_free(first);
    outcome_free(other);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_halves),     cmocka_unit_test(test_same_bits),  cmocka_unit_test(test_nonfinite),
        cmocka_unit_test(test_orthogonal), cmocka_unit_test(test_everywhere), cmocka_unit_test(test_spills),
        cmocka_unit_test(test_bytes),      cmocka_unit_test(test_resumes),    cmocka_unit_test(test_refused),
        cmocka_unit_test(test_pieces),     cmocka_unit_test(test_ranks),
    };
    return cmocka_run_group_tests_name("muon", tests, NULL, NULL);
}
