/*
 * The loop of spillway train: batches from the data, a step, evaluations, saves, until the steps are done, a signal comes or the
 * write budget is spent.
 */
#include "train.h"
#include <math.h>
#include <stdio.h>

/* So many steps behind a save all that is updated has been, also late: what it lacks then would come with the next save alone. */
enum { SKIPPED_MAX = 10, UPDATES_PASSED = 2 };

spw_status
cli_train_finish_save(train_run *r, spw_error *err)
{
    spw_checkpoint_job *job = r->saving;
    r->saving = NULL;
    return spw_checkpoint_finish(job, r->last_checkpoint, err);
}

/* Of the last step, once. wait: it is on disk when this returns. */
static spw_status
save(train_run *r, bool wait, spw_error *err)
{
    SPW_TRY(cli_train_finish_save(r, err));
    if (r->config.run.checkpoint_dir[0] == '\0' || r->at.step == r->saved_step)
        return SPW_OK;
    r->at.bytes_written = r->written;
    SPW_TRY(spw_checkpoint_begin(&r->saving, r->engine, &r->config, r->config.run.checkpoint_dir, &r->at, err));
    r->saved_step = r->at.step;
    return wait ? cli_train_finish_save(r, err) : SPW_OK;
}

uint64_t
cli_train_batch_max(const spw_config *c)
{
    return c->accumulation > c->run.eval_batches ? c->accumulation : c->run.eval_batches;
}

uint64_t
cli_train_eval_batches(const spw_config *c, const spw_data *data)
{
    const uint64_t have = spw_data_sequences(data, SPW_SPLIT_VALIDATION) / c->micro_batch;
    return have < c->run.eval_batches ? have : c->run.eval_batches;
}

/* Ranks that share sequences have the same ones: so many such groups have others, and this one's place among them. */
static uint64_t
groups_of(const train_run *r)
{
    return r->world / spw_config_sharers(&r->config);
}

static uint64_t
group_of(const train_run *r)
{
    return r->rank / spw_config_sharers(&r->config);
}

/* Where micro-batch i of this rank begins: they go to the ranks in turn, so that these see together what one would see. */
static uint64_t
own_share(const train_run *r, uint64_t position, uint64_t i)
{
    return position + (i * groups_of(r) + group_of(r)) * r->config.micro_batch;
}

static spw_status
fill(train_run *r, spw_split split, uint64_t position, uint64_t batches, spw_error *err)
{
    uint64_t B = r->config.micro_batch, tokens = B * r->config.data.seq_length;
    for (uint64_t i = 0; i < batches; i++) {
        const uint64_t at = own_share(r, position, i);
        SPW_TRY(spw_data_fill(r->data, split, at, B, r->tokens + i * tokens, r->targets + i * tokens, err));
        for (uint64_t k = 0; k < B; k++)
            SPW_TRY(cli_train_fill_answers(r, split, at + k, i * B + k, err));
    }
    return SPW_OK;
}

/* The next step's sequences come from disk while this one computes. */
static void
ask_ahead(const train_run *r, uint64_t position)
{
    uint64_t B = r->config.micro_batch;
    for (uint64_t i = 0; i < r->config.accumulation; i++)
        spw_data_ask(r->data, SPW_SPLIT_TRAIN, own_share(r, position, i), B);
}

/* The same sequences whatever the number of ranks: where they do not share out evenly, some have one without targets. */
static spw_status
evaluate(train_run *r, double *loss_out, spw_error *err)
{
    uint64_t B = r->config.micro_batch, batches = cli_train_eval_batches(&r->config, r->data);
    const uint64_t groups = groups_of(r), each = (batches + groups - 1) / groups;
    const uint64_t own = batches / groups + (group_of(r) < batches % groups);
    uint64_t tokens = B * r->config.data.seq_length;
    *loss_out = NAN;
    if (batches == 0)
        return SPW_OK;
    SPW_TRY(fill(r, SPW_SPLIT_VALIDATION, 0, own, err));
    for (uint64_t i = own * tokens; i < each * tokens; i++) {
        r->tokens[i] = 0;
        r->targets[i] = -1;
    }
    return spw_engine_eval(r->engine, r->tokens, r->targets, (uint32_t)each, loss_out, err);
}

static void
add_step(train_run *r, const spw_step_result *s)
{
    r->sum.tokens += s->tokens;
    r->sum.step_s += s->step_s;
    r->sum.compute_s += s->compute_s;
    r->sum.other_s += s->other_s;
    r->sum.cpu_s += s->cpu_s;
    r->sum.run_delay_s += s->run_delay_s;
    r->sum.bound_s += s->bound_s;
    for (int k = 0; k < SPW_RESOURCE_COUNT; k++)
        r->sum.bounds_s[k] += s->bounds_s[k];
    r->sum.nvme_read += s->nvme_read;
    r->sum.nvme_write += s->nvme_write;
    r->sum.h2d += s->h2d;
    r->sum.d2h += s->d2h;
    r->sum.gather += s->gather;
    r->sum.reduce += s->reduce;
    r->sum.trade += s->trade;
    for (int k = 0; k < SPW_STALL_COUNT; k++)
        r->sum.stall_s[k] += s->stall_s[k];
    if (s->targets > 0) {
        r->first_loss = isnan(r->first_loss) ? s->loss : r->first_loss;
        r->last_loss = s->loss;
    }
    r->steps_done++;
    r->skipped += s->skipped;
    r->undone_steps += s->undone > 0;
    r->twice_steps += s->again;
}

/*
 * Steps that are skipped for ever. A loss scale that can fall ends that by itself, until it cannot. Without one, the weights
 * are beyond it after SKIPPED_MAX in a row: a gradient that is not finite because of what the step was shown comes alone.
 */
static spw_status
check_skipped(train_run *r, uint64_t step, const spw_step_result *s, bool lowest, spw_error *err)
{
    bool dynamic = spw_engine_loss_scaler(r->engine)->dynamic;
    uint64_t before = step - SKIPPED_MAX;
    char remedy[100];
    r->skipped_in_row = s->skipped && !dynamic ? r->skipped_in_row + 1 : 0;
    if (s->skipped && lowest)
        return SPW_RAISE(err, SPW_ENONFINITE,
                         "step %llu: the gradient is not finite at the lowest loss scale, %g (fp16.min_loss_scale): "
                         "every step would be skipped from here on; a smaller learning rate, clipping or bf16 may help",
                         (unsigned long long)step, s->loss_scale);
    if (r->skipped_in_row < SKIPPED_MAX)
        return SPW_OK;
    if (before > r->first_step)
        snprintf(remedy, sizeof remedy, "go on from a checkpoint of before step %llu, with a lower",
                 (unsigned long long)before);
    else
        snprintf(remedy, sizeof remedy, "the weights that this run began with are no good, or try a lower");
    return SPW_RAISE(err, SPW_ENONFINITE,
                     "steps %llu to %llu were skipped, because the norm of their gradients is not finite, and so would "
                     "be all that follow: %s learning rate (optimizer.params.lr)%s",
                     (unsigned long long)(before + 1), (unsigned long long)step, remedy,
                     r->config.fp16 ? " or fp16.loss_scale, which 0 makes dynamic" : "");
}

/* All ranks stop when one of them got a signal; of the write budget all of them know. */
static spw_status
go_on(train_run *r, bool *more, spw_error *err)
{
    bool left = r->at.step < r->config.run.steps, spent = r->spent || cli_train_budget_spent(r);
    double signals = cli_stop;
    SPW_TRY(spw_engine_sum(r->engine, &signals, 1, err));
    r->stopped = left && signals > 0;
    *more = left && !spent && !r->stopped;
    return SPW_OK;
}

spw_status
cli_train_loop(train_run *r, spw_error *err)
{
    const spw_config *c = &r->config;
    const uint64_t per_step = c->micro_batch * c->accumulation * groups_of(r);
    bool more, save_due = false;
    r->first_step = r->at.step;
    r->saved_step = r->resumed ? r->at.step : UINT64_MAX;
    r->begin_ns = spw_now_ns();
    if (spw_engine_plan(r->engine)->device_apart)
        spw_thread_be_prompt(); /* it launches what such a device computes, beside as many threads that update as there are processors */
    r->first_loss = r->last_loss = NAN; /* no step had a target yet */
    if (r->at.step >= c->run.steps && r->rank == 0)
        printf("nothing to do: the checkpoint is of step %llu, and spillway.steps is %llu\n",
               (unsigned long long)r->at.step, (unsigned long long)c->run.steps);
    for (;;) {
        spw_step_result s;
        double eval_loss = NAN;
        uint64_t step = r->at.step + 1, begin = spw_now_ns();
        bool lowest = spw_loss_scale_is_spent(spw_engine_loss_scaler(r->engine), c);
        double data_s;
        SPW_TRY(go_on(r, &more, err));
        if (!more)
            break;
        SPW_TRY(fill(r, SPW_SPLIT_TRAIN, r->at.data_position, c->accumulation, err));
        ask_ahead(r, r->at.data_position + per_step);
        data_s = (double)(spw_now_ns() - begin) * 1e-9;
        SPW_TRY(spw_engine_step(r->engine, r->tokens, r->targets, (uint32_t)c->accumulation,
                                spw_schedule_lr(c, r->at.updates + 1), &s, err));
        s.stall_s[SPW_STALL_DATA] += data_s;
        s.step_s += data_s;
        if (r->saving != NULL && step > r->saved_step + UPDATES_PASSED)
            spw_checkpoint_hand_over(r->saving);
        if (r->saving != NULL && spw_checkpoint_done(r->saving))
            SPW_TRY(cli_train_finish_save(r, err));
        r->at.step = step;
        r->at.data_position += per_step;
        r->at.updates = spw_engine_updates(r->engine);
        r->at.tokens += (double)s.tokens;
        save_due = save_due || (c->run.checkpoint_interval > 0 && step % c->run.checkpoint_interval == 0);
        SPW_TRY(cli_train_count_written(r, err));
        if (c->run.delayed_update > 0 && !s.skipped &&
            (save_due ||
             (step == c->run.steps && c->run.save_at_end))) { /* lets the late update run: what is saved is evaluated */
            SPW_TRY(save(r, !c->run.save_in_background, err));
            save_due = false;
        }
        if (c->run.eval_interval > 0 && (step % c->run.eval_interval == 0 || step == c->run.steps))
            SPW_TRY(evaluate(r, &eval_loss, err));
        add_step(r, &s);
        cli_train_log_step(r, step, &s, eval_loss);
        cli_train_tell_monitor(r, step, &s, eval_loss);
        cli_train_show_step(r, step, &s, eval_loss);
        SPW_TRY(check_skipped(r, step, &s, lowest, err));
        if (save_due && r->skipped_in_row == 0) { /* else it might be the last good one that keep_last removes */
            SPW_TRY(save(r, !c->run.save_in_background, err));
            save_due = false;
        }
    }
    if (r->spent && r->steps_done == 0)
        return SPW_OK; /* nothing was loaded */
    SPW_TRY(spw_engine_drain(r->engine, err));
    SPW_TRY(cli_train_count_written(r, err));
    if (r->stopped && r->rank == 0)
        printf("stopped by a signal after step %llu of %llu\n", (unsigned long long)r->at.step,
               (unsigned long long)c->run.steps);
    if (r->skipped_in_row > 0)
        r->config.run.keep_last = 0; /* it may be the weights: what was saved before stays */
    return c->run.save_at_end || r->spent || r->stopped ? save(r, true, err) : cli_train_finish_save(r, err);
}
