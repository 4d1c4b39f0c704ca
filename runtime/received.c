/*
 * What a rank receives from the others in a step, before there are any: how often each unit is gathered (rehearse_gathers.c) and how
 * often its gradient is summed, times the bytes of one such operation, which are those that wire_weights.c and wire_grads.c move. Over
 * NCCL and through staging they are the same. What steps tell each other, sums of a few numbers, is not counted.
 */
#include "engine_internal.h"
#include "quant.h"

/* So much from each of the others, of which so many are on this rank's host, it among them. */
static void
add(spw_received *r, uint32_t ranks, uint32_t near, uint64_t bytes)
{
    r->all += (ranks - 1) * bytes;
    r->far += (ranks - near) * bytes;
}

/* How many of these ranks, `every` apart, are on this one's host. */
static uint32_t
count_near(const spw_engine *e, uint32_t first, uint32_t count, uint32_t every)
{
    uint32_t near = 0;
    for (uint32_t i = 0; i < count; i++)
        near += spw__host_of(e, first + i * every) == spw__host_of(e, e->rank);
    return near;
}

/* Of those that a unit goes around among. */
static uint32_t
near_in_circle(const spw_engine *e, uint32_t circle)
{
    return count_near(e, e->rank / circle * circle, circle, 1);
}

/* Of so many steps: anew in these, the first time in each when an update has changed it, and again from what the group has. */
static void
add_gathers(const spw_engine *e, uint32_t unit_idx, uint32_t steps, uint32_t anew, uint32_t again, spw_plan *p)
{
    const uint32_t circle = e->layout.parts, near = near_in_circle(e, circle);
    const uint64_t part = e->layout.units[unit_idx].elems;
    const uint64_t bytes =
        spw__zeropp_coded(e, unit_idx) ? spw__quant_bytes(SPW_QUANT_INT8, part) : part * e->compute_bytes;
    spw_received one = {0};
    add(&one, circle, near, bytes);
    if (e->zeropp.by_host > 0) /* from each other host once */
        one.far = (circle / near - 1) * bytes;
    p->gathered.all += anew * one.all + again * (e->zeropp.group - 1) * spw__zeropp_kept_bytes(e, unit_idx);
    p->gathered.far += anew * one.far;
    p->gathered_first.all += (anew < steps ? anew : steps) * one.all;
    p->gathered_first.far += (anew < steps ? anew : steps) * one.far;
}

static void
add_sums(const spw_engine *e, uint32_t unit_idx, uint64_t sums, spw_received *r)
{
    const uint32_t parts = e->layout.parts, circle = parts > 1 ? parts : e->world, near = near_in_circle(e, circle);
    const uint32_t groups = e->world / circle, hosts = e->world / (e->zeropp.grads ? e->zeropp.host_ranks : e->world);
    const uint64_t part = e->layout.units[unit_idx].elems;
    spw_received one = {0};
    if (parts == 1) { /* each sums its share, and all get all of them */
        add(&one, circle, near, 2 * spw_layout_part(part, circle) * sizeof(float));
    } else if (e->zeropp.grads) { /* inside the host for a rank of each host, then its sum from each other one */
        add(&one, e->zeropp.host_ranks, e->zeropp.host_ranks, hosts * part * sizeof(float));
        add(&one, hosts, 1, spw__quant_bytes(SPW_QUANT_INT4, part));
    } else {
        add(&one, circle, near, part * spw_dtype_bytes(e->config.comm_dtype));
        if (groups > 1)
            add(&one, groups, count_near(e, e->rank % circle, groups, circle),
                2 * spw__share_elems(part, groups) * sizeof(float));
    }
    r->all += sums * one.all;
    r->far += sums * one.far;
}

/* What its part of matrices lacks that Muon takes whole, with sums of squares. take: (parts) to work with */
static void
add_matrices(const spw_engine *e, uint32_t unit_idx, spw_comm_piece *take, spw_received *r)
{
    const uint32_t parts = e->layout.parts, first = e->rank / parts * parts;
    (void)spw__whole_got(&e->layout, unit_idx, spw_dtype_bytes(e->config.run.grad_dtype), e->layout.part, NULL, take,
                         NULL);
    for (uint32_t p = 0; p < parts; p++) {
        r->all += take[p].bytes;
        r->far += spw__host_of(e, first + p) != spw__host_of(e, e->rank) ? take[p].bytes : 0;
    }
}

spw_status
spw__count_received(spw_engine *e, const plan_input *in, spw_error *err)
{
    const uint32_t units = e->layout.unit_count;
    uint32_t steps = 1; /* that gathers are of */
    uint32_t *anew = spw_mem_calloc(2 * (uint64_t)units, sizeof *anew);
    spw_comm_piece *take = spw_mem_calloc(e->layout.parts, sizeof *take);
    spw_status st = anew != NULL && take != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "gathers of %u units", units);
    if (st == SPW_OK && e->layout.parts > 1)
        st = spw__plan_gathers(&e->plan, in, anew, anew + units, &steps, err);
    for (uint32_t u = 0; st == SPW_OK && u < units; u++) {
        if (e->layout.parts > 1)
            add_gathers(e, u, steps, anew[u], anew[units + u], &e->plan);
        if (e->layout.units[u].whole && e->layout.parts > 1)
            add_matrices(e, u, take, &e->plan.reduced);
        if (e->layout.units[u].trainable)
            add_sums(e, u, (in->holds ? 1 : in->passes) + (e->layout.of_vocab[u] ? in->piece_returns : 0),
                     &e->plan.reduced);
    }
    e->plan.gathered.all /= steps;
    e->plan.gathered.far /= steps;
    e->plan.gathered_first.all /= steps;
    e->plan.gathered_first.far /= steps;
    spw_mem_free(anew);
    spw_mem_free(take);
    return st;
}
