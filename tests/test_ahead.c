/*
 * Updates before the norm is known: whatever they had done when it came, and whether it stands or is taken back, every bit is that of
 * a run that waited. What was there before comes back, also from disk; what changed there meanwhile is found; the bytes are those of the
 * plan, and where the disk has no room for them updates wait.
 */
#include "lib_rig.h"
#include "engine_internal.h"
#include "gpu_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

enum { STEPS = 9 };

static void
mode(spw_config *c, const char *what)
{
    snprintf(c->run.update_ahead, sizeof c->run.update_ahead, "%s", what);
}

typedef struct outcome {
    double losses[STEPS], norms[STEPS];
    uint64_t ahead, undone, undone_steps, again;
    uint32_t passes;
} outcome;

static void
train(rig *r, int first, int end, outcome *o)
{
    for (int s = first; s < end; s++) {
        spw_step_result x;
        rig_need(r, rig_step(r, (uint64_t)s, &x));
        o->losses[s] = x.loss;
        o->norms[s] = x.grad_norm;
        o->ahead += x.ahead;
        o->undone += x.undone;
        o->undone_steps += x.undone > 0;
        o->again += x.again;
        assert_true(!x.again || (!x.skipped && x.grad_norm > r->c.gradient_clipping));
        assert_true(!x.again || r->e->plan.grad_nvme > 0);
        assert_true(x.again || x.skipped || x.undone == 0 || r->e->plan.grad_nvme == 0 || r->e->plan.grad_host > 0);
    }
}

static int
by_size(const void *a, const void *b)
{
    return *(const double *)a > *(const double *)b ? 1 : *(const double *)a < *(const double *)b ? -1 : 0;
}

/* What a run that waits gives, with a clipping that some of its steps reach. The limit is where half of them would. */
static void
open_want(rig *want, spw_family family, spw_state_format format, outcome *o, void (*change)(rig *))
{
    double norms[STEPS], limit = 0;
    for (int k = 0; k < 2; k++) {
        rig_config(want, family, format, SPW_TIER_HOST);
        want->c.gradient_clipping = k == 0 ? 1e9 : limit;
        want->c.run.chunk_elems = 4096;
        if (change != NULL)
            change(want);
        rig_open(want);
        rig_need(want, spw_engine_init_params(want->e, 7, &want->err));
        *o = (outcome){.ahead = 0};
        train(want, 0, STEPS, o);
        o->passes = want->e->plan.passes;
        memcpy(norms, o->norms, sizeof norms);
        qsort(norms, STEPS, sizeof *norms, by_size);
        limit = (norms[STEPS / 2] + norms[STEPS / 2 - 1]) / 2;
        if (k == 0)
            rig_remove(want);
    }
    assert_true(norms[0] <= want->c.gradient_clipping && norms[STEPS - 1] > want->c.gradient_clipping);
}

/*
 * Where state lives: all on nvme, one slot of each kind; the same with more; weights in memory, one slot or more; some of each. From
 * IN_MEMORY on records are in memory: all of it; weights on nvme; logs for about half of it; for what a budget leaves. From SPILLED on
 * gradients wait on nvme where updates do: all of them, one slot of each kind; weights in memory, more slots; the least memory, one window;
 * half of the gradients in memory.
 */
enum { PLACES = 14, IN_MEMORY = 6, SPILLED = 10 };
static bool
in_memory(int k)
{
    return k >= IN_MEMORY && k < SPILLED;
}

static void
place(rig *r, const rig *want, spw_family family, spw_state_format format, int k)
{
    rig_config(r, family, format, SPW_TIER_NVME);
    r->c.gradient_clipping = want->c.gradient_clipping;
    r->c.run.chunk_elems = 4096;
    if (k == 2 || k == 3 || k == 11)
        r->c.zero.offload_param = SPW_TIER_HOST;
    if (k == 4)
        r->c.zero.offload_param = SPW_TIER_DEVICE;
    if (in_memory(k))
        r->c.zero.offload_optimizer = SPW_TIER_HOST;
    if (in_memory(k) && k != 7)
        r->c.zero.offload_param = SPW_TIER_HOST;
    if (k >= SPILLED)
        snprintf(r->c.run.gradients, sizeof r->c.run.gradients, "nvme");
    r->c.run.weight_slots = r->c.run.record_slots = k == 1 ? 3 : k == 3 || k == 11 || k == 13 ? 4 : 1;
    mode(&r->c, "always");
}

static void
open_place(rig *r, int k)
{
    if (k == 5) { /* half of the weights in host memory, and perhaps a record */
        rig_open(r);
        r->c.run.host_memory = r->e->plan.host_bytes + r->e->plan.weight_nvme / 2 + 4 * 4096;
        rig_close(r);
    }
    if (k == 12) {
        rig_open(r);
        r->c.run.host_memory = r->e->plan.host_bytes - r->e->plan.grad_windows / 2 *
                                                           spw__layout_largest_spilled(&r->e->layout) *
                                                           spw_dtype_bytes(r->c.run.grad_dtype);
        rig_close(r);
    }
    if (k == 13) { /* weights come first */
        rig_open(r);
        r->c.run.host_memory = r->e->plan.host_bytes + r->e->plan.weight_nvme + r->e->plan.grad_nvme / 2;
        rig_close(r);
    }
    if (k == 8 || k == 9) {
        uint64_t logs;
        rig_open(r);
        logs = r->e->plan.spare_host;
        rig_close(r);
        mode(&r->c, "never");
        rig_open(r);
        r->c.run.host_memory = r->e->plan.host_bytes + (k == 8 ? logs / 2 : 3 * logs);
        mode(&r->c, "always");
        rig_close(r);
    }
    rig_open(r);
}

/* Second places and logs: all that can have one, or as many as were to be. */
static void
check_places(const spw_plan *p, int k)
{
    assert_true(p->ahead);
    assert_true(k != 5 || p->weight_host > 0);
    assert_true(((k >= 2 && k < IN_MEMORY) || k == 11 || k == 13) == (p->undo_write > 0));
    assert_true(k == 13 || in_memory(k) == (p->spare_host > 0));
    assert_true((!in_memory(k) || k == 7) == (p->spare_nvme > 0));
    assert_true((k >= SPILLED) == (p->grad_nvme > 0));
    assert_true((k == 13) == (p->grad_nvme > 0 && p->grad_host > 0));
    assert_true(k < SPILLED || p->grad_windows == (k == 12 ? 1u : 2u));
    if (k == 8)
        assert_true(p->spared_host > p->record_host / 8 && p->spared_host <= p->record_host / 4 * 3);
    else
        assert_true(!in_memory(k) || p->spared_host == p->record_host);
}

static void
everywhere(spw_family family, spw_state_format format, void (*change)(rig *))
{
    outcome want_is;
    uint64_t undone = 0, ahead = 0, memory_undone = 0, memory_ahead = 0, again = 0, spilled_ahead = 0;
    rig want;
    open_want(&want, family, format, &want_is, change);
    for (int k = 0; k < (want_is.passes > 1 ? SPILLED : change == NULL ? PLACES : PLACES - 1); k++) {
        for (int chaos = k >= SPILLED && !SANITIZED; chaos < (SANITIZED ? 1 : 2); chaos++) {
            outcome is = {.ahead = 0};
            rig got;
            place(&got, &want, family, format, k);
            if (change != NULL)
                change(&got);
            got.c.run.chaos_seed = chaos > 0 || SANITIZED ? 900 + (uint64_t)(10 * k + chaos) : 0;
            got.c.run.integrity = k + chaos != 2;
            open_place(&got, k);
            check_places(&got.e->plan, k);
            rig_need(&got, spw_engine_init_params(got.e, 7, &got.err));
            train(&got, 0, STEPS, &is);
            assert_memory_equal(want_is.losses, is.losses, sizeof is.losses);
            assert_memory_equal(want_is.norms, is.norms, sizeof is.norms);
            rig_same_state(&want, &got, "updates ahead");
            undone += is.undone;
            ahead += is.ahead;
            memory_undone += in_memory(k) ? is.undone : 0;
            memory_ahead += in_memory(k) ? is.ahead : 0;
            again += is.again;
            spilled_ahead += k >= SPILLED ? is.ahead : 0;
            rig_remove(&got);
        }
    }
    assert_true(ahead > 0 && memory_ahead > 0);
    assert_true(undone > 0 && memory_undone > 0);
    assert_true(want_is.passes > 1 || (again > 0 && spilled_ahead > 0));
    printf("# %llu steps made again\n", (unsigned long long)again);
    printf("# in memory %llu stood, %llu were taken back\n", (unsigned long long)memory_ahead,
           (unsigned long long)memory_undone);
    rig_remove(&want);
}

/* All formats: the state, losses and norms of a run that waits. */
static void
test_same_bits(void **state)
{
    (void)state;
    for (int f = 0; f < SPW_STATE_COUNT; f++) {
        if (f != SPW_STATE_MIXED_F16)
            everywhere(SPW_FAMILY_GPT2, (spw_state_format)f, NULL);
    }
    everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, NULL);
}

static void
two_passes(rig *r)
{
    r->c.accumulation = 2;
    r->c.train_batch_size = 2 * r->c.micro_batch;
    r->c.run.micro_batches_per_pass = 1;
    r->c.run.grad_dtype = SPW_F32;
}

/* Frozen units beside, adapters, passes that are added up, experts. */
static void
test_others(void **state)
{
    (void)state;
    everywhere(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, rig_freeze_mlps);
    everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, rig_lora);
    everywhere(SPW_FAMILY_GPT2, SPW_STATE_MIXED, two_passes);
    everywhere(SPW_FAMILY_MIXTRAL, SPW_STATE_SPLIT_BF16, NULL);
}

/* A gradient that overflows in some steps: those are skipped, and what had been updated ahead is what it was. */
static void
test_skipped(void **state)
{
    double losses[4][12];
    uint64_t digest[4], skipped[4] = {0};
    (void)state;
    for (int k = 0; k < 4; k++) { /* waits; state in memory; on nvme; gradients too */
        rig r;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_MIXED_F16, k < 2 ? SPW_TIER_HOST : SPW_TIER_NVME);
        r.c.bf16 = false;
        r.c.fp16 = true;
        r.c.loss_scale.initial_power = 24; /* far too much: the first steps overflow */
        r.c.loss_scale.hysteresis = 1;
        r.c.loss_scale.window = 3;
        r.c.loss_scale.min = 1;
        r.c.gradient_clipping = 0;
        r.c.run.grad_dtype = SPW_F16;
        r.c.run.chunk_elems = 4096;
        r.c.run.chaos_seed = 31;
        mode(&r.c, k == 0 ? "never" : "always");
        if (k == 3)
            snprintf(r.c.run.gradients, sizeof r.c.run.gradients, "nvme");
        rig_open(&r);
        assert_true(r.e->plan.ahead == (k > 0) && (r.e->plan.grad_nvme > 0) == (k == 3));
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        for (int s = 0; s < 12; s++) {
            spw_step_result x;
            rig_need(&r, rig_step(&r, (uint64_t)s, &x));
            losses[k][s] = x.loss;
            skipped[k] += x.skipped;
            assert_false(x.again); /* nothing is clipped */
        }
        digest[k] = tiny_digest(r.e);
        rig_remove(&r);
    }
    assert_true(skipped[0] > 0 && skipped[0] < 12);
    for (int k = 1; k < 4; k++) {
        assert_int_equal(skipped[0], skipped[k]);
        assert_memory_equal(losses[0], losses[k], sizeof losses[0]);
        assert_int_equal(digest[0], digest[k]);
    }
}

/* Saved in the middle, by one that updates ahead and is taken back now and then, or makes steps again; gone on with in host memory. */
static void
test_resumes(void **state)
{
    const int places[] = {3, 11};
    outcome want_is, is = {.ahead = 0};
    rig want, got, on;
    (void)state;
    open_want(&want, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, &want_is, NULL);
    for (int k = 0; k < 2; k++) {
        place(&got, &want, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, places[k]);
        rig_open(&got);
        rig_need(&got, spw_engine_init_params(got.e, 7, &got.err));
        train(&got, 0, 4, &is);
        rig_save(&got, 4);
        train(&got, 4, STEPS, &is);
        assert_memory_equal(want_is.losses, is.losses, sizeof is.losses);
        rig_config(&on, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_HOST);
        on.c.gradient_clipping = want.c.gradient_clipping;
        on.c.run.chunk_elems = 4096;
        rig_load(&on, &got, 4);
        train(&on, 4, STEPS, &is);
        assert_memory_equal(want_is.losses, is.losses, sizeof is.losses);
        rig_same_state(&want, &on, "resumed");
        rig_remove(&on);
        rig_remove(&got);
    }
    assert_true(is.again > 0);
    rig_remove(&want);
}

/*
 * A device that computes something else when it is to do a step again: a loss by its last bit, or an element of a gradient. It takes its time
 * for gradients, so that updates have begun when the step turns out to clip.
 */
typedef enum oddity { ODD_NOTHING, ODD_LOSS, ODD_NORM, ODD_COUNT } oddity;
static struct {
    const spw_gpu_calls *own;
    spw_gpu_calls calls;
    oddity odd;
    uint64_t heads, first; /* micro-batches of the step whose loss was computed; of its first passes */
} odd;

static void
odd_head(spw_gpu_queue *q, float *losses, act *dx, float *dw, const act *x, const act *w, const int32_t *targets,
         const float *weights, act *logits, uint64_t rows_per_chunk, uint64_t M, uint64_t V, uint64_t C,
         float grad_scale, float cap, unsigned flags)
{
    odd.own->linear_cross_entropy(q, losses, dx, dw, x, w, targets, weights, logits, rows_per_chunk, M, V, C,
                                  grad_scale, cap, flags);
    if (++odd.heads > odd.first && odd.odd == ODD_LOSS)
        losses[0] = nextafterf(losses[0], INFINITY);
}

static void
odd_backward(spw_gpu_queue *q, act *dx, float *dw, float *db, const act *dy, const act *x, const act *w, uint64_t M,
             uint64_t N, uint64_t K, unsigned flags)
{
    odd.own->linear_backward(q, dx, dw, db, dy, x, w, M, N, K, flags);
    if (odd.heads > odd.first && odd.odd == ODD_NORM)
        dw[0] += 1e-3f;
    spw_sleep_ns(1000000);
}

static void
make_odd(const rig *r, oddity what)
{
    odd.own = r->e->compute->calls;
    odd.calls = *odd.own;
    odd.calls.linear_cross_entropy = odd_head;
    odd.calls.linear_backward = odd_backward;
    odd.odd = what;
    odd.first = r->c.accumulation;
    r->e->compute->calls = &odd.calls;
}

/* Steps, each with a save that is under way meanwhile, until one is made again or fails: which, or STEPS. */
static int
until_again(rig *r, outcome *o, spw_status *st)
{
    for (int s = 0; s < STEPS; s++) {
        spw_checkpoint_job *job = NULL;
        spw_checkpoint_state at = {.step = (uint64_t)s, .updates = (uint64_t)s};
        spw_step_result x = {.again = false};
        rig_need(r, spw_checkpoint_begin(&job, r->e, &r->c, r->dir, &at, &r->err));
        odd.heads = 0;
        *st = rig_step(r, (uint64_t)s, &x);
        rig_need(r, spw_checkpoint_finish(job, NULL, &r->err));
        o->losses[s] = x.loss;
        o->norms[s] = x.grad_norm;
        assert_int_equal(odd.heads, *st != SPW_OK || x.again ? 2 * odd.first : odd.first);
        if (*st != SPW_OK || x.again)
            return s;
    }
    return STEPS;
}

/*
 * The second loss, or norm, has other bits than the first: the run ends, and says so with all four numbers; nothing more can be saved or
 * trained. What was being saved when the step began is whole, and gone on with elsewhere gives what a device that can be trusted gives.
 */
static void
test_computes_otherwise(void **state)
{
    outcome want_is;
    rig want;
    (void)state;
    open_want(&want, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, &want_is, NULL);
    for (oddity what = ODD_NOTHING; what < ODD_COUNT; what++) {
        outcome is = {.ahead = 0};
        spw_error first, after = {0};
        spw_status st;
        char says[160];
        double numbers[2];
        int s;
        rig got, on;
        place(&got, &want, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, what == ODD_LOSS ? 10 : 11);
        rig_open(&got);
        rig_need(&got, spw_engine_init_params(got.e, 7, &got.err));
        make_odd(&got, what);
        s = until_again(&got, &is, &st);
        assert_true(s < STEPS);
        if (what == ODD_NOTHING) {
            assert_int_equal(st, SPW_OK);
            train(&got, s + 1, STEPS, &is);
            assert_memory_equal(want_is.losses, is.losses, sizeof is.losses);
            rig_same_state(&want, &got, "made again");
            rig_remove(&got);
            continue;
        }
        assert_int_equal(st, SPW_ECORRUPT);
        first = got.err;
        snprintf(says, sizeof says, "a step that was computed twice had loss %.17g and gradient norm %.17g, and then ",
                 want_is.losses[s], want_is.norms[s]);
        if (strstr(first.message, says) != first.message ||
            strstr(first.message, ": device cpu, or its memory, does not compute the same each time") == NULL ||
            sscanf(first.message + strlen(says), "%lf and %lf", &numbers[0], &numbers[1]) != 2)
            fail_msg("\"%s\" does not begin with \"%s\"", first.message, says);
        assert_true((numbers[0] != want_is.losses[s]) == (what == ODD_LOSS));
        assert_true((numbers[1] != want_is.norms[s]) == (what == ODD_NORM));
        odd.odd = ODD_NOTHING;
        assert_int_equal(rig_step(&got, (uint64_t)s, &(spw_step_result){0}), SPW_ECORRUPT);
        assert_string_equal(got.err.message, first.message);
        assert_int_equal(spw_checkpoint_save(got.e, &got.c, got.dir,
                                             &(spw_checkpoint_state){.step = STEPS, .updates = STEPS}, NULL, &after),
                         SPW_ECORRUPT);
        assert_non_null(strstr(after.message, first.message));
        rig_config(&on, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_HOST);
        on.c.gradient_clipping = want.c.gradient_clipping;
        on.c.run.chunk_elems = 4096;
        rig_load(&on, &got, s);
        train(&on, s, STEPS, &is);
        assert_memory_equal(want_is.losses, is.losses, sizeof is.losses);
        rig_same_state(&want, &on, "gone on with");
        rig_remove(&on);
        rig_remove(&got);
    }
    rig_remove(&want);
}

/* Nothing clips: each record goes out once, to one place or the other, and with it weights of before for what did not wait. */
static void
test_bytes(void **state)
{
    (void)state;
    for (int k = 0; k < 4; k += 2) { /* weights on nvme, and in host memory */
        spw_store_stats before, after;
        outcome o = {.ahead = 0};
        uint64_t written, most, once;
        rig r;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_NVME);
        r.c.zero.offload_param = k == 0 ? SPW_TIER_NVME : SPW_TIER_HOST;
        r.c.gradient_clipping = 1e9;
        r.c.run.chunk_elems = 4096;
        r.c.run.weight_slots = r.c.run.record_slots = 2;
        mode(&r.c, "always");
        rig_open(&r);
        assert_int_equal(r.e->plan.path_bytes[0], r.e->plan.weight_nvme + r.e->plan.record_nvme + r.e->plan.spare_nvme);
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
        tiny_settle(spw_engine_store(r.e));
        spw_store_get_stats(spw_engine_store(r.e), &before);
        train(&r, 0, STEPS, &o);
        assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
        tiny_settle(spw_engine_store(r.e));
        spw_store_get_stats(spw_engine_store(r.e), &after);
        written = after.nvme_write_bytes - before.nvme_write_bytes;
        once = STEPS * (r.e->plan.record_nvme + r.e->plan.weight_nvme);
        most = after.ahead * 4096 * 2; /* every chunk has as many elements */
        assert_int_equal(after.undone, 0);
        assert_true(after.ahead > 0);
        assert_true(k == 0 ? written == once && r.e->plan.undo_write == 0 : written > once && written <= once + most);
        rig_remove(&r);
    }
}

/* A disk that has no room for two of everything, gradients on nvme too or not, nothing to wait for, a budget of writes: updates are not ahead, and the plan says why. */
static void
test_without(void **state)
{
    outcome o = {.ahead = 0};
    (void)state;
    for (int k = 0; k < 5; k++) {
        bool said = false;
        rig r;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_NVME);
        r.c.run.chunk_elems = 4096;
        rig_open(&r);
        assert_true(r.e->plan.ahead); /* as it comes */
        if (k == 1)
            snprintf(r.c.run.gradients, sizeof r.c.run.gradients, "nvme");
        if (k == 1) {
            rig_close(&r);
            rig_open(&r);
            assert_true(r.e->plan.ahead && r.e->plan.grad_nvme > 0);
        }
        for (uint32_t i = 0; i < r.c.zero.param_path.count && k < 2; i++)
            r.c.zero.param_path.bytes[i] = r.c.zero.optimizer_path.bytes[i] = r.e->plan.path_bytes[0] - 4096;
        if (k == 2)
            r.c.gradient_clipping = 0;
        if (k == 3)
            mode(&r.c, "never");
        if (k == 4)
            r.c.run.write_budget = 1ull << 40;
        rig_close(&r);
        rig_open(&r);
        assert_true(!r.e->plan.ahead && r.e->plan.spare_nvme == 0);
        for (uint32_t i = 0; i < r.e->plan.decision_count; i++)
            said = said || strcmp(r.e->plan.decisions[i].name, "spillway.update_ahead") == 0;
        assert_true(said == (k < 2 || k == 4));
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        train(&r, 0, 3, &o);
        assert_true(o.ahead == 0 && o.undone == 0);
        rig_remove(&r);
    }
}

/* ---------------------------------------------------------------- the store alone */

enum { CHUNKS = 12, CHUNK = 5 * 4096, ELEMS = CHUNKS * CHUNK }; /* a chunk comes in two pieces */

typedef struct alone {
    spw_gpu *gpu;
    spw_store *store;
    spw_store_unit unit;
    spw_store_chunk chunks[CHUNKS];
    char dir[256];
    const char *path;
} alone;

/* Everything is `by` more. The log, of a byte for four elements, is full of what that was; for much it has no room in the second piece of every fifth. */
static spw_status
add(void *ctx, uint32_t chunk_idx, spw_store_state *state, const void *grad, uint64_t first, uint64_t count,
    spw_error *err)
{
    const float by = *(const float *)ctx;
    (void)grad;
    (void)err;
    if (chunk_idx % 3 == 0)
        spw_sleep_ns(200000); /* others wait for their turn */
    state->no_room = state->log != NULL && state->log_weights && chunk_idx % 5 == 4 && first > 0 && by > 3;
    if (state->no_room)
        return SPW_OK;
    for (uint64_t i = first; i < first + count; i++) {
        ((float *)state->weights)[i] += by;
        ((float *)state->record)[i] += by;
    }
    if (state->log != NULL)
        memset((char *)state->log + first / 4, (int)by, count / 4);
    return SPW_OK;
}

static spw_status
take_away(void *ctx, uint32_t chunk_idx, spw_store_state *state, const void *grad, uint64_t first, uint64_t count,
          spw_error *err)
{
    (void)ctx;
    (void)chunk_idx;
    (void)err;
    assert_non_null(grad);
    assert_true((state->weights != NULL) || !state->log_weights);
    for (uint64_t i = first; i < first + count; i++) {
        const float by = (float)((const signed char *)state->log)[i / 4];
        if (state->log_weights)
            ((float *)state->weights)[i] -= by;
        ((float *)state->record)[i] -= by;
    }
    return SPW_OK;
}

static spw_status
number(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    (void)ctx;
    (void)grad;
    (void)err;
    for (int i = 0; i < CHUNK; i++)
        ((float *)weights)[i] = ((float *)record)[i] = (float)(CHUNK * chunk_idx) + (float)i;
    return SPW_OK;
}

/* ctx: how much more than at the start. */
static spw_status
compare(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    const float more = *(const float *)ctx;
    (void)grad;
    (void)err;
    for (int i = 0; i < CHUNK; i++) {
        float want = (float)(CHUNK * chunk_idx) + (float)i + more;
        if (((const float *)weights)[i] != want || ((const float *)record)[i] != want)
            fail_msg("chunk %u element %d: %g and %g, not %g", chunk_idx, i, ((const float *)weights)[i],
                     ((const float *)record)[i], want);
    }
    return SPW_OK;
}

/* The same for a save, which takes its time. */
static spw_status
save(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    spw_sleep_ns(300000);
    return compare(ctx, chunk_idx, weights, record, grad, err);
}

static void
open_alone(alone *a, spw_tier weights, spw_tier records, uint32_t slots, float *by, uint64_t chaos)
{
    spw_store_config c = {.units = &a->unit,
                          .chunks = a->chunks,
                          .unit_count = 1,
                          .chunk_count = CHUNKS,
                          .weight_bytes = 4,
                          .record = {{128, {128}, 1}},
                          .update_reads_weights = true,
                          .weight_slot_count = slots,
                          .record_slot_count = slots,
                          .device_cache_bytes = ELEMS * 4,
                          .worker_count = 2,
                          .integrity = true,
                          .path_count = 1,
                          .log_bytes_32 = {8, 8},
                          .update = add,
                          .undo = take_away,
                          .update_ctx = by,
                          .chaos_seed = chaos};
    spw_error err = {0};
    memset(a, 0, sizeof *a);
    tiny_dir_make(a->dir);
    a->path = a->dir;
    a->unit = (spw_store_unit){.chunk_count = CHUNKS, .elems = ELEMS, .trainable = true};
    for (uint32_t k = 0; k < CHUNKS; k++)
        a->chunks[k] = (spw_store_chunk){.first = k * CHUNK,
                                         .elems = CHUNK,
                                         .weight_tier = weights,
                                         .record_tier = records,
                                         .spare = records == SPW_TIER_NVME || k != 5}; /* one has to wait */
    assert_int_equal(spw_gpu_open(&a->gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 1}, NULL), SPW_OK);
    c.gpu = a->gpu;
    c.paths = &a->path;
    if (spw_store_create(&a->store, &c, &err) != SPW_OK)
        fail_msg("%s", err.message);
    assert_int_equal(spw_store_sweep(a->store, SPW_SWEEP_INIT, number, NULL, NULL), SPW_OK);
    tiny_settle(a->store);
}

static void
close_alone(alone *a)
{
    spw_store_destroy(a->store);
    spw_gpu_close(a->gpu);
    tiny_dir_remove(a->dir);
}

/* A step in which `count` chunks have been updated before the gate, and all that they left has gone out. */
static void
go_ahead(alone *a, uint64_t count)
{
    spw_store_stats before, now;
    spw_store_get_stats(a->store, &before);
    spw_store_step_begin(a->store, NULL, SPW_STEP_AHEAD);
    assert_int_equal(spw_store_grad_open(a->store, 0, NULL), SPW_OK);
    memset(spw_store_grad(a->store, 0), 0, ELEMS * 4);
    spw_store_grad_ready(a->store, 0);
    do {
        spw_sleep_ns(100000);
        spw_store_get_stats(a->store, &now);
        assert_int_equal(spw_store_check(a->store, NULL), SPW_OK);
    } while (now.updates - before.updates < count);
    if (count == CHUNKS)
        tiny_settle(a->store);
}

/*
 * At every moment: all is as before, and can be done again, differently, or not at all; and what stands stands. A save meanwhile has what
 * was there when it began.
 */
static void
test_back(void **state)
{
    const spw_tier weights[] = {SPW_TIER_HOST, SPW_TIER_NVME, SPW_TIER_DEVICE, SPW_TIER_HOST, SPW_TIER_NVME},
                   records[] = {SPW_TIER_NVME, SPW_TIER_NVME, SPW_TIER_NVME, SPW_TIER_HOST, SPW_TIER_HOST};
    (void)state;
    uint64_t no_room = 0;
    alarm(200); /* one that waits for ever */
    for (uint64_t run = 0; run < (SANITIZED ? 20 : 80); run++) {
        float by = 1, sum = 0, saved;
        alone a;
        spw_store_stats stats;
        uint64_t undone = 0, generation = 0;
        bool saves = run / 2 % 2 == 1;
        open_alone(&a, weights[run % 5], records[run % 5], run % 7 < 4 ? 1 : 3, &by, run % 2 == 0 ? run : 0);
        for (uint64_t step = 0; step < 6; step++) {
            uint64_t count = (run + 5 * step) % (records[run % 5] == SPW_TIER_NVME ? CHUNKS + 1 : CHUNKS - 2),
                     what = (run / 3 + step) % 4;
            by = (float)(1 + step);
            saved = sum;
            if (saves)
                assert_int_equal(spw_store_snapshot_begin(a.store, &generation, true, save, &saved, NULL), SPW_OK);
            go_ahead(&a, count);
            if (what == 0) { /* it stands */
                if (run / 5 % 2 == 0)
                    spw_store_step_hold(a.store);
                spw_store_step_go(a.store);
                sum += by;
            } else {
                if (what == 3) {
                    spw_store_step_hold(a.store);
                    spw_sleep_ns(run % 4 * 150000); /* a save looks at what was read */
                }
                if (what >= 2) { /* otherwise */
                    assert_int_equal(spw_store_step_undo(a.store, NULL), SPW_OK);
                    by = -3;
                    spw_store_step_go(a.store);
                    sum += by;
                } else {
                    spw_store_step_skip(a.store);
                }
                spw_store_get_stats(a.store, &stats);
                assert_true(stats.undone - undone >= count);
                undone = stats.undone;
                no_room += stats.no_room;
            }
            generation += what != 1;
            assert_int_equal(spw_store_drain(a.store, NULL), SPW_OK);
            if (saves)
                assert_int_equal(spw_store_snapshot_finish(a.store, NULL), SPW_OK);
            assert_int_equal(spw_store_sweep(a.store, SPW_SWEEP_VISIT, compare, &sum, NULL), SPW_OK);
        }
        close_alone(&a);
    }
    assert_true(no_room > 0);
    alarm(0);
}

typedef struct saving {
    float more;
    uint32_t seen; /* atomic */
} saving;

static spw_status
save_each(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    saving *s = ctx;
    __atomic_fetch_add(&s->seen, 1, __ATOMIC_RELAXED);
    return save(ctx, chunk_idx, weights, record, grad, err);
}

/*
 * A step that broke off while updates ran ahead, so that nobody has decided about them: a save that was under way has every chunk once, as it
 * was before, and so sees it who looks at the store after that.
 */
static void
test_broken_off(void **state)
{
    const spw_tier weights[] = {SPW_TIER_HOST, SPW_TIER_NVME, SPW_TIER_DEVICE, SPW_TIER_HOST, SPW_TIER_NVME},
                   records[] = {SPW_TIER_NVME, SPW_TIER_NVME, SPW_TIER_NVME, SPW_TIER_HOST, SPW_TIER_HOST};
    (void)state;
    alarm(200);
    for (uint64_t run = 0; run < (SANITIZED ? 20 : 80); run++) {
        float by = 1, sum = 0;
        alone a;
        open_alone(&a, weights[run % 5], records[run % 5], run % 7 < 4 ? 1 : 3, &by, run % 2 == 0 ? run : 0);
        for (uint64_t step = 0; step < 4; step++) {
            const uint64_t generation = 0;
            saving now = {.more = sum};
            bool saves = run / 2 % 2 == 0;
            if (saves)
                assert_int_equal(spw_store_snapshot_begin(a.store, &generation, true, save_each, &now, NULL), SPW_OK);
            go_ahead(&a, (run + step) % (CHUNKS - 2));
            if (saves) {
                assert_int_equal(spw_store_drain(a.store, NULL), SPW_OK);
                assert_int_equal(spw_store_snapshot_finish(a.store, NULL), SPW_OK);
                assert_int_equal(now.seen, CHUNKS);
            }
            assert_int_equal(spw_store_sweep(a.store, SPW_SWEEP_VISIT, compare, &sum, NULL), SPW_OK);
        }
        close_alone(&a);
    }
    alarm(0);
}

/* One whose log had no room is tried again in the next step, and if that fails not in the next two; what stands makes up for it. */
static void
test_rest(void **state)
{
    const float step_by[] = {4, 1, 4, 4, 1, 1, 1};
    const uint64_t may[] = {9, 11, 9, 9, 9, 9, 11}; /* of 12 chunks one has no log, and two are full of 4 */
    float by, sum = 0;
    alone a;
    (void)state;
    alarm(200);
    open_alone(&a, SPW_TIER_HOST, SPW_TIER_HOST, 1, &by, 0);
    for (int step = 0; step < 7; step++) {
        spw_store_stats before, after;
        by = step_by[step];
        spw_store_get_stats(a.store, &before);
        go_ahead(&a, may[step]);
        do {
            spw_sleep_ns(20000000); /* no more come */
            spw_store_get_stats(a.store, &after);
        } while (after.no_room - before.no_room < 2 && by > 3);
        assert_int_equal(after.updates - before.updates, may[step]);
        assert_int_equal(after.no_room - before.no_room, by > 3 ? 2 : 0);
        spw_store_step_go(a.store);
        sum += by;
        assert_int_equal(spw_store_drain(a.store, NULL), SPW_OK);
        assert_int_equal(spw_store_sweep(a.store, SPW_SWEEP_VISIT, compare, &sum, NULL), SPW_OK);
    }
    close_alone(&a);
    alarm(0);
}

/* Weights of before that changed on disk are no weights: the error names them, file and offset. */
static void
test_spoiled(void **state)
{
    spw_error err = {0};
    char swap[1024], offset[64];
    float by = 1;
    alone a;
    (void)state;
    open_alone(&a, SPW_TIER_HOST, SPW_TIER_NVME, 2, &by, 0);
    go_ahead(&a, CHUNKS);
    tiny_swap_file(a.dir, swap);
    tiny_spoil_file(swap, 0);
    assert_int_equal(spw_store_step_undo(a.store, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "weights of chunk"));
    assert_non_null(strstr(err.message, swap));
    snprintf(offset, sizeof offset, "at offset %d ",
             3 * CHUNK * 4); /* record, its weights of before, the other record, and those */
    if (strstr(err.message, "weights of chunk 0,") != NULL && strstr(err.message, offset) == NULL)
        fail_msg("%s", err.message);
    close_alone(&a);
}

/* After a step that clips the next is not tried, after attempts that failed ever fewer are, and calm brings them back. */
static void
test_policy(void **state)
{
    ahead_policy p = {0};
    uint32_t tried = 0;
    (void)state;
    assert_false(spw__ahead_worth(&p)); /* nothing is known */
    spw__ahead_learn(&p, false, true);
    assert_true(spw__ahead_worth(&p));
    spw__ahead_learn(&p, true, false);
    assert_false(spw__ahead_worth(&p));
    for (int s = 0; s < 1000; s++) { /* every second step clips */
        bool tries = spw__ahead_worth(&p);
        tried += tries;
        spw__ahead_learn(&p, tries, s % 2 == 0);
    }
    assert_true(tried <= 1);
    for (int s = 0; s < 1000; s++) { /* every twentieth */
        bool tries = spw__ahead_worth(&p);
        tried += tries;
        spw__ahead_learn(&p, tries, s % 20 != 0);
    }
    assert_true(tried > 500);
    p = (ahead_policy){0};
    for (int s = 0; s < 200; s++) {
        spw__ahead_learn(&p, true, false);
        assert_true(p.wait <= 63);
    }
    for (tried = 0; !spw__ahead_worth(&p); tried++)
        spw__ahead_learn(&p, false, true);
    assert_int_equal(tried, 64);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_bits),
                                       cmocka_unit_test(test_others),
                                       cmocka_unit_test(test_skipped),
                                       cmocka_unit_test(test_resumes),
                                       cmocka_unit_test(test_computes_otherwise),
                                       cmocka_unit_test(test_bytes),
                                       cmocka_unit_test(test_without),
                                       cmocka_unit_test(test_back),
                                       cmocka_unit_test(test_broken_off),
                                       cmocka_unit_test(test_rest),
                                       cmocka_unit_test(test_spoiled),
                                       cmocka_unit_test(test_policy)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
