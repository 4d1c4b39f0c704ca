/*
 * What a run of spillway train writes to its swap folders, on all ranks and since its first run, and the budget for it
 * (spillway.write_budget): which step would exceed it is known before that step, alike on all ranks.
 */
#include "train.h"

static uint64_t
written_per_step(const train_run *r)
{
    return spw_engine_plan(r->engine)->traffic[SPW_PACE_DEFAULT].nvme_write;
}

/* If all that is updated before the norm is known has to be taken back, it was written in vain. */
static uint64_t
written_at_most(const train_run *r)
{
    return written_per_step(r) + spw_engine_plan(r->engine)->spare_nvme;
}

/* Bytes that this rank has written to swap in this run, with what the updates so far will still write. */
static uint64_t
written_here(const train_run *r)
{
    const spw_plan *p = spw_engine_plan(r->engine);
    uint64_t updates = spw_engine_updates(r->engine) - r->first_update;
    uint64_t placed = p->weight_nvme - p->weight_in_place + p->record_nvme; /* once at the start */
    uint64_t due = placed + updates * written_per_step(r);
    spw_store_stats stats;
    spw_store_get_stats(spw_engine_store(r->engine), &stats);
    return stats.nvme_write_bytes > due ? stats.nvme_write_bytes : due;
}

spw_status
cli_train_count_written(train_run *r, spw_error *err)
{
    double sums[] = {(double)written_here(r), (double)written_at_most(r),
                     (double)r->sum.nvme_write}; /* exact: < 9 PB */
    SPW_TRY(spw_engine_sum(r->engine, sums, 3, err));
    r->written = r->carried_bytes + (uint64_t)sums[0];
    r->each_step = (uint64_t)sums[1];
    r->steps_wrote = (uint64_t)sums[2];
    return SPW_OK;
}

bool
cli_train_budget_spent(train_run *r)
{
    uint64_t budget = r->config.run.write_budget, next = r->each_step, before = r->written;
    char a[32], b[32], c[32];
    r->spent =
        r->at.step < r->config.run.steps && budget > 0 && next > 0 && (before > budget || next > budget - before);
    if (r->spent && r->rank == 0)
        printf("%s before step %llu: %s written to swap, the next step's %s would exceed spillway.write_budget (%s)\n",
               strcmp(r->config.run.write_budget_action, "pause") == 0 ? "paused" : "stopped",
               (unsigned long long)(r->at.step + 1),
               r->steps_done > 0 ? spw_format_bytes(a, sizeof a, before)
                                 : spw_format_bytes(a, sizeof a, r->carried_bytes),
               spw_format_bytes(b, sizeof b, next + (r->steps_done > 0 ? 0 : before - r->carried_bytes)),
               spw_format_bytes(c, sizeof c, budget));
    return r->spent;
}
