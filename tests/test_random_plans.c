/* Plans of random layouts, placements and budgets: sums agree, budgets hold, and each kind of memory has what it should. */
#include "lib_plan.h"
#include "runtime_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static uint64_t
pick(uint64_t seed, uint64_t round, uint64_t what, uint64_t n)
{
    uint32_t r[4];
    spw_philox(seed, round, what, r);
    return (((uint64_t)r[0] << 32) | r[1]) % n;
}

/* The plan's bytes are what offload would take; last needed, farthest away. */
static void
check_activations(const spw_plan *p, const plan_input *in)
{
    uint32_t all = in->inference ? 0 : in->activation_slots * in->activation_micros;
    const uint32_t *n = p->activation_count;
    spw_act_config c = {.dtype = SPW_F32,
                        .elems = in->activation_elems,
                        .slot_count = all > 0 ? in->activation_slots : 0,
                        .micro_count = in->activation_micros,
                        .places = in->activation_places,
                        .working_count = p->activation_working,
                        .staging_count = p->activation_staging};
    spw_tier asked = in->config->run.activations;
    spw_act_need need;
    spw_act_compute_need(&c, &need);
    assert_int_equal(n[SPW_TIER_DEVICE] + n[SPW_TIER_HOST] + n[SPW_TIER_NVME], all);
    assert_int_equal(p->activations_device, in->flow_device + need.device_bytes);
    assert_int_equal(p->activations_host,
                     need.host_bytes +
                         (n[SPW_TIER_DEVICE] < all && need.host_bytes > 0 ? in->activation_tables.thread_bytes : 0) +
                         (n[SPW_TIER_NVME] > 0 ? in->activation_tables.transfer_bytes : 0));
    assert_int_equal(p->activations_nvme, n[SPW_TIER_NVME] * need.nvme_bytes);
    assert_true((n[SPW_TIER_NVME] == 0) == (p->activation_staging == 0));
    assert_true((n[SPW_TIER_DEVICE] == all) == (p->activation_working == 0));
    for (uint32_t i = 0; i < all; i++) {
        spw_tier tier = in->activation_places[i].tier;
        assert_true(i == 0 || tier <= in->activation_places[i - 1].tier);
        assert_true(asked == SPW_TIER_COUNT || asked == tier);
        assert_true(tier != SPW_TIER_NVME || in->activation_places[i].path_idx < p->path_count);
    }
}

/* Device memory that the plan may take; 0: whatever it likes. */
static uint64_t
room_of(const plan_input *in)
{
    return in->config->run.device_memory == SPW_AUTO ? in->device_room : in->config->run.device_memory;
}

/* What lies between checkpoints: as much of it as fits is kept, all of them are on the device then, and only that is not computed. */
static void
check_tapes(const spw_plan *p, const plan_input *in)
{
    uint64_t all = in->inference ? 0 : (uint64_t)in->activation_slots_used * in->activation_micros;
    bool always = strcmp(in->config->run.recompute, "always") == 0;
    assert_int_equal(p->tapes_device, p->tape_count * in->tape_bytes);
    assert_true(p->tape_count <= all);
    if (p->tape_count > 0)
        assert_true(!always && p->activation_count[SPW_TIER_HOST] + p->activation_count[SPW_TIER_NVME] == 0);
    if (p->tape_count < all && !always && !in->device_in_host &&
        p->activation_count[SPW_TIER_HOST] + p->activation_count[SPW_TIER_NVME] == 0)
        assert_true(room_of(in) > 0 && p->device_bytes + in->tape_bytes > room_of(in));
    assert_true(fabs(p->flops - in->flops + (all > 0 ? in->recompute_flops * p->tape_count / (double)all : 0)) < 1);
}

/*
 * Records on a device that updates them are those of the first units, whole: as many as the ratio asks for, or as find room.
 * Returns their elements. Where only the ratio may put them there, one unit less would leave the host too much.
 */
static uint64_t
check_first_units(const spw_plan *p, const plan_input *in)
{
    const spw_layout *l = in->layout;
    uint64_t there = 0, last = 0, spilled = 0, total = in->inference ? 0 : l->elems;
    bool ended = false;
    for (uint32_t u = 0; u < l->unit_count && in->device_updates; u++) {
        const spw_store_chunk *c = &l->chunks[l->units[u].chunk_first];
        bool all = c->record_tier == SPW_TIER_DEVICE;
        for (uint32_t k = 0; k < l->units[u].chunk_count; k++)
            assert_true((c[k].record_tier == SPW_TIER_DEVICE) == all && (!all || c[k].weight_tier == SPW_TIER_DEVICE));
        assert_false(all && ended);
        ended = !all;
        last = all ? l->units[u].elems : last;
        there += all ? l->units[u].elems : 0;
    }
    if (in->device_updates && in->config->zero.offload_optimizer != SPW_TIER_DEVICE) {
        double rest = 1 - in->device_share;
        assert_true((double)(total - there) <= rest * (double)total + 1);
        if (!in->fills)
            assert_true(there == 0 || (double)(total - there + last) > rest * (double)total);
    }
    assert_int_equal(p->trained_device, there);
    for (uint32_t u = 0; u < l->unit_count; u++) { /* gradients wait beside records, all of a unit's */
        const spw_store_unit *unit = &l->units[u];
        for (uint32_t k = 0; k < unit->chunk_count && unit->spills; k++)
            assert_int_equal(l->chunks[unit->chunk_first + k].record_tier, SPW_TIER_NVME);
        spilled += unit->spills ? unit->elems : 0;
    }
    assert_int_equal(p->grad_nvme, spilled * in->grad_bytes);
    assert_int_equal(p->grad_host + p->grad_nvme + p->grad_device, total * in->grad_bytes);
    assert_true(spilled == 0 || (strcmp(in->config->run.gradients, "host") != 0 && p->grad_windows - 1 < 2));
    return there;
}

/*
 * State that fills the device takes nothing that the plan without it has, but for what auto gathers above three blocks, and all that it can: the
 * next unit would not fit, or not everything is gathered.
 */
static void
check_filled(const spw_plan *p, plan_input *in)
{
    static spw_plan q;
    const spw_layout *l = in->layout;
    uint64_t more = 0, gathered = 0;
    uint32_t next = 0;
    spw_error err = {0};
    if (!in->fills || !in->device_updates || in->config->zero.offload_optimizer == SPW_TIER_DEVICE || room_of(in) == 0)
        return;
    while (next < l->unit_count && l->chunks[l->units[next].chunk_first].record_tier == SPW_TIER_DEVICE)
        next++;
    for (uint32_t u = 0; u < l->unit_count; u++)
        gathered += !in->direct || u >= next ? l->units[u].elems * in->compute_bytes : 0;
    for (uint32_t k = 0; next < l->unit_count && k < l->units[next].chunk_count; k++) {
        uint64_t elems = l->chunks[l->units[next].chunk_first + k].elems;
        more += elems * (in->weight_bytes + in->grad_bytes) + spw_round_up(elems / 32 * in->record_bytes_32[0], 4096);
    }
    if (next < l->unit_count && !in->direct && p->cache_device == gathered)
        assert_true(p->device_bytes + more > room_of(in));
    in->fills = false;
    if (spw__plan_make(&q, in, &err) == SPW_OK) {
        assert_true(p->trained_device >= q.trained_device);
        assert_int_equal(p->tapes_device, q.tapes_device);
        assert_int_equal(p->activations_device, q.activations_device);
        assert_true(p->cache_device >= q.cache_device || p->cache_device == gathered ||
                    (in->config->run.device_memory == SPW_AUTO && p->cache_device >= 3 * in->largest_block_bytes));
    }
    in->fills = true;
}

/* A bound on what is gathered that ends inside a page makes room for no more than there was. */
static void
check_bounded(const spw_plan *p, const plan_input *in, spw_config *c)
{
    static spw_plan q;
    spw_error err = {0};
    c->zero.max_live_parameters = p->cache_device / in->compute_bytes - 1;
    if (spw__plan_make(&q, in, &err) == SPW_OK)
        assert_true(q.cache_device <= p->cache_device && q.device_bytes <= q.device_budget);
}

static uint32_t spared; /* plans that have some */

/* Logs in host memory: only of what can have one, the last chunks first, and as many as the budget holds. */
static void
check_spares(const spw_plan *p, const plan_input *in)
{
    uint64_t bytes = 0, records = 0;
    for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
        const spw_store_chunk *c = &in->layout->chunks[i];
        uint64_t record = c->elems / 32 * in->record_bytes_32[0],
                 all = spw_round_up(c->elems / 32 * in->log_bytes_32[c->weight_tier != SPW_TIER_NVME], 4096);
        assert_true(!c->spare || c->record_tier == SPW_TIER_NVME ||
                    (c->record_tier == SPW_TIER_HOST && c->weight_tier != SPW_TIER_DEVICE));
        bytes += c->spare && c->record_tier == SPW_TIER_HOST ? all : 0;
        records += c->spare && c->record_tier == SPW_TIER_HOST ? record : 0;
        if (!c->spare && p->spare_host > 0 && c->record_tier == SPW_TIER_HOST && c->weight_tier != SPW_TIER_DEVICE &&
            p->host_budget != SPW_AUTO)
            assert_true(all > p->host_budget - p->host_bytes);
    }
    assert_int_equal(bytes, p->spare_host);
    assert_int_equal(records, p->spared_host);
    assert_true(bytes == 0 || (p->ahead && in->config->gradient_clipping > 0 && !in->inference));
    spared += bytes > 0;
}

/* Whatever the sizes and budgets: sums agree, budgets hold, nothing overflows. */
static void
test_random_plans(void **state)
{
    enum { UNITS = 12, CHUNKS = 200, ROUNDS = SANITIZED ? 500 : 2000 };
    const char *given = getenv("SPW_SEED");
    uint64_t seed = given != NULL ? strtoull(given, NULL, 0) : 20261121, fitted = 0, filled = 0;
    static spw_config c;
    static spw_plan p;
    (void)state;
    spared = 0;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        spw_store_unit units[UNITS];
        static spw_store_chunk chunks[CHUNKS];
        plan_use uses[2 * UNITS];
        uint32_t n = 0;
        uint64_t at = 0, weights, records, on_paths = 0, act_moves = 0, act_nvme = 0, act_bytes, act_pages, there,
                 moved = 0;
        spw_layout l = {.parts = 1, .units = units, .chunks = chunks};
        spw_error err = {0};
        spw_status st;
        bool unclipped = false;
        static spw_act_place places[60];
        plan_input in = {
            .config = &c, .layout = &l, .inference = pick(seed, round, n++, 10) == 0, .tapes_most = UINT32_MAX};
        plan_nvme_config(&c, SPW_STATE_SPLIT);
#define PICK(n) pick(seed, round, 100 + at++, (n))
        c.zero.offload_param = (spw_tier)PICK(3);
        c.zero.offload_optimizer = (spw_tier)PICK(3);
        c.run.prefetch = PICK(8) != 0;
        c.gradient_clipping = (double)PICK(2);
        c.run.weight_slots = (uint32_t)PICK(60) % 45 % 30;
        c.run.record_slots = (uint32_t)PICK(60) % 45 % 30;
        c.zero.param_path.bytes[0] = c.zero.optimizer_path.bytes[0] = PICK(4) == 0 ? 1ull << PICK(50) : 0;
        l.unit_count = 1 + (uint32_t)PICK(UNITS);
        const uint64_t shift = PICK(30),
                       chunk = 4096 * (1 + PICK(1ull << shift)); /* units are cut at multiples of it */
        for (uint32_t u = 0; u < l.unit_count; u++) {
            units[u] = (spw_store_unit){
                .chunk_first = l.chunk_count, .chunk_count = 1 + (uint32_t)PICK(CHUNKS / UNITS), .trainable = true};
            for (uint32_t k = 0; k < units[u].chunk_count; k++) {
                uint64_t elems = k + 1 < units[u].chunk_count ? chunk : 4096 * (1 + PICK(chunk / 4096));
                chunks[l.chunk_count++] = (spw_store_chunk){.unit_idx = u, .first = units[u].elems, .elems = elems};
                units[u].elems += elems;
            }
            l.elems += units[u].elems;
            if (units[u].elems * 4 > in.largest_block_bytes)
                in.largest_block_bytes = units[u].elems * 4;
        }
        l.params = l.elems;
        in.weight_bytes = 2 + 2 * (uint32_t)PICK(2);
        in.grad_bytes = 2 + 2 * (uint32_t)PICK(2);
        in.compute_bytes = 4;
        in.record_bytes_32[0] = (uint32_t)(32 + PICK(400));
        in.update_reads_weights = PICK(2) != 0;
        in.log_bytes_32[0] = (uint32_t)(1 + PICK(400));
        in.log_bytes_32[1] = (uint32_t)(1 + PICK(400));
        in.grads_device = PICK(1 << 30);
        in.process_bytes = PICK(1 << 30);
        in.passes = in.micro_batches = 1 + (uint32_t)PICK(3);
        in.future_max = 4 * l.unit_count + 64;
        in.tokens = 1 + PICK(1 << 20);
        in.flops = 1e12;
        in.recompute_flops = 3e11;
        in.tape_bytes = 4096 * (1 + PICK(1000));
        snprintf(c.run.recompute, sizeof c.run.recompute, "%s", PICK(4) ? "auto" : "always");
        in.activation_places = places;
        in.activation_elems = 1 + (PICK(4) ? PICK(1 << 22) : PICK(1000));
        in.activation_slots = (uint32_t)PICK(20);
        in.activation_slots_used = in.activation_slots - (uint32_t)PICK(in.activation_slots + 1);
        in.activation_micros = 1 + (uint32_t)PICK(3);
        in.micro_batches = in.passes * in.activation_micros - (uint32_t)PICK(in.activation_micros);
        in.flow_device = 4096 * (1 + PICK(1000));
        in.activation_tables.thread_bytes = 4096 * PICK(30);
        in.activation_tables.transfer_bytes = 4096 * PICK(300);
        act_bytes = in.activation_elems * in.compute_bytes;
        act_pages = spw_round_up(act_bytes, 4096);
        c.run.activations = (spw_tier)PICK(SPW_TIER_COUNT + 1);
        c.run.cpu_checkpointing = PICK(4) == 0 && c.run.activations != SPW_TIER_DEVICE;
        n = 0;
        for (uint32_t k = 0; k < 2 * l.unit_count - 1; k++) {
            in.forward_count += k + 1 < l.unit_count;
            uses[n++] = (plan_use){k < l.unit_count ? k : 2 * (l.unit_count - 1) - k, k + 1, k + 1, false};
        }
        in.uses = uses;
        in.use_count = n;
        if (PICK(2))
            c.run.host_memory = in.process_bytes + PICK(2 * l.elems * 20);
        if (PICK(2))
            c.run.device_memory = PICK(2 * l.elems * 20);
        c.run.host_memory = PICK(50) == 0 ? UINT64_MAX - 1 : c.run.host_memory;
        weights = l.elems * in.weight_bytes;
        records = in.inference ? 0 : l.elems / 32 * in.record_bytes_32[0];
        in.device_updates =
            c.zero.offload_optimizer != SPW_TIER_DEVICE ? PICK(2) != 0 : c.zero.offload_param == SPW_TIER_DEVICE;
        in.device_updates = in.device_updates && !in.inference;
        in.direct = PICK(2) != 0;
        in.device_room = PICK(2) ? 0 : 4 * PICK(l.elems * 20);
        in.device_share = PICK(3) ? 0 : 1 - (double)PICK(101) / 100;
        in.fills = PICK(2) != 0;
        snprintf(c.run.gradients, sizeof c.run.gradients, "%s", (const char *const[]){"auto", "host", "nvme"}[PICK(3)]);
        c.zero.max_live_parameters = PICK(3) ? UINT64_MAX : PICK(l.elems);
        c.zero.max_in_cpu = PICK(3) ? 0 : PICK(l.elems);
        in.gather_most = PICK(3) ? 0 : in.largest_block_bytes + 4096 * PICK(l.elems / 1024);
        in.single_grad = PICK(3) == 0;
        st = spw__plan_make(&p, &in, &err);
        there = check_first_units(&p, &in);
        if (st != SPW_OK) {
            assert_int_equal(err.status, SPW_ENOFIT);
            assert_int_not_equal(p.lack, SPW_LACK_NOTHING);
        } else {
            spw_prediction x;
            spw_rates r = plan_some_rates();
            fitted++;
            assert_true(p.host_bytes <= p.host_budget && p.device_bytes <= p.device_budget);
            assert_true(in.device_room == 0 || p.device_bytes <= room_of(&in));
            assert_true(in.gather_most == 0 || p.cache_device <= in.gather_most);
            assert_true(!in.single_grad || p.single_grad);
            for (uint32_t i = 0; i < p.path_count; i++)
                on_paths += p.path_bytes[i];
            for (uint32_t i = 0; i < l.chunk_count; i++) { /* swap files hold whole pages */
                uint64_t record = l.chunks[i].elems / 32 * in.record_bytes_32[0];
                if (l.chunks[i].record_tier == SPW_TIER_NVME && l.units[l.chunks[i].unit_idx].trainable &&
                    !in.inference)
                    on_paths -= spw_round_up(record, 4096) - record;
            }
            assert_int_equal(on_paths, p.weight_nvme + p.record_nvme + p.grad_nvme + p.activations_nvme + p.spare_nvme);
            check_activations(&p, &in);
            check_tapes(&p, &in);
            for (uint32_t i = 0; i < in.activation_slots_used * in.micro_batches && !in.inference; i++) {
                uint32_t slot = i / in.micro_batches, micro = i % in.micro_batches % in.activation_micros;
                act_moves += places[slot * in.activation_micros + micro].tier != SPW_TIER_DEVICE;
                act_nvme += places[slot * in.activation_micros + micro].tier == SPW_TIER_NVME;
            }
            for (uint32_t u = 0; u < l.unit_count && c.gradient_clipping > 0 && p.grad_nvme > 0 && !p.ahead; u++) {
                if (units[u]
                        .spills) { /* all but the first one's, which comes last and stays in its window, if it is one of two */
                    moved = p.grad_nvme - (p.grad_windows == 2 ? units[u].elems * in.grad_bytes : 0);
                    break;
                }
            }
            spw_plan_predict(&p, &r, 1, &x);
            assert_true(in.inference || (x.timed && x.step_s > 0 && isfinite(x.step_s)));
            for (int k = 0; k < SPW_PACE_COUNT && !in.inference; k++) {
                uint64_t read = p.traffic[k].nvme_read - act_nvme * act_pages;
                assert_int_equal(p.traffic[k].nvme_write, /* everything once */
                                 p.weight_nvme + p.record_nvme + moved + act_nvme * act_pages);
                assert_true(read >= p.record_nvme + moved);
                assert_true(read <= p.record_nvme + moved + (2 * in.passes + 1) * p.weight_nvme);
                assert_int_equal(p.traffic[k].d2h,
                                 in.passes * (l.elems - there) * in.grad_bytes + act_moves * act_bytes);
            }
        }
        assert_int_equal(p.weight_device + p.weight_host + p.weight_nvme, weights);
        assert_int_equal(p.record_device + p.record_host + p.record_nvme, records);
        assert_int_equal(p.host_bytes, p.process_host + p.tables_host + p.grad_host + p.slots_host +
                                           p.activations_host + p.weight_host + p.record_host + p.spare_host);
        check_spares(&p, &in);
        assert_int_equal(p.trained_device, there);
        assert_int_equal(p.grad_device, there * in.grad_bytes);
        assert_int_equal(p.device_bytes, p.grad_device + p.grads_device + p.activations_device + p.arena_device +
                                             p.batch_device + p.padding_device + p.weight_device + p.record_device +
                                             p.cache_device + p.tapes_device);
        for (uint32_t i = 0; i < p.decision_count; i++) {
            assert_true(strlen(p.decisions[i].reason) > 10);
            unclipped = unclipped || strcmp(p.decisions[i].name, "gradient_clipping") == 0;
        }
        assert_int_equal(unclipped, c.gradient_clipping <= 0 && !in.inference); /* other programs clip by default */
        if (st == SPW_OK)
            check_filled(&p, &in);
        if (st == SPW_OK && p.cache_device > 0)
            check_bounded(&p, &in, &c);
        filled += st == SPW_OK && in.device_updates && in.fills && in.device_share == 0 && there > 0 &&
                  c.zero.offload_optimizer != SPW_TIER_DEVICE;
#undef PICK
    }
    print_message("seed %llu: %llu of %d fit\n", (unsigned long long)seed, (unsigned long long)fitted, ROUNDS);
    assert_true(fitted > ROUNDS / 4 && filled > ROUNDS / 100 && spared > ROUNDS / 100);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_plans)};
    return cmocka_run_group_tests(tests, plan_dir_make, plan_dir_remove);
}
