/*
 * What a run of spillway train writes down for programs: its log (spillway.run_log), one JSON object a line, one for the start, for
 * each step and for the end, and the monitors that DeepSpeed has.
 */
#include "train.h"
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void
log_object(train_run *r, json_t *object)
{
    char *text = r->log == NULL || object == NULL ? NULL : json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(17));
    if (text != NULL) {
        if (fprintf(r->log, "%s\n", text) < 0 || fflush(r->log) != 0) {
            fprintf(stderr, "spillway: warning: spillway.run_log %s: %s; no more is written there\n",
                    r->config.run.run_log, strerror(errno));
            fclose(r->log);
            r->log = NULL;
        }
    }
    free(text);
    json_decref(object);
}

/* NaN (the loss of a step without targets, too) and infinity have no JSON number: null. */
static json_t *
number(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static json_t *
stall_object(const spw_step_result *s)
{
    json_t *o = json_object();
    for (int k = 0; k < SPW_STALL_COUNT; k++)
        json_object_set_new(o, spw_stall_name((spw_stall)k), json_real(s->stall_s[k]));
    return o;
}

static json_t *
bound_object(const spw_step_result *s)
{
    json_t *o = json_object();
    for (int k = 0; k < SPW_RESOURCE_COUNT; k++)
        json_object_set_new(o, spw_resource_name((spw_resource)k), json_real(s->bounds_s[k]));
    return o;
}

static json_t *
bytes_object(const spw_step_result *s)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "nvme_read", (json_int_t)s->nvme_read, "nvme_write",
                     (json_int_t)s->nvme_write, "h2d", (json_int_t)s->h2d, "d2h", (json_int_t)s->d2h, "gather",
                     (json_int_t)s->gather, "reduce", (json_int_t)s->reduce, "trade", (json_int_t)s->trade);
}

static json_t *
peak_object(const train_run *r)
{
    const spw_gpu *gpu = spw_engine_gpu(r->engine);
    uint64_t device = spw_gpu_bytes_peak(gpu), host = cli_train_memory_peak(r);
    if (spw_gpu_get_info(gpu)->host_addressable) /* its memory is the host's, and counted there */
        host -= device;
    return json_pack("{s:I, s:I, s:I}", "device", (json_int_t)device, "host", (json_int_t)host, "pinned",
                     (json_int_t)0);
}

spw_status
cli_train_open_log(train_run *r, spw_error *err)
{
    char folder[SPW_PATH_BYTES], *slash;
    if (r->config.run.run_log[0] == '\0' || r->rank > 0)
        return SPW_OK;
    snprintf(folder, sizeof folder, "%s", r->config.run.run_log);
    slash = strrchr(folder, '/');
    if (slash != NULL) {
        *slash = '\0';
        if (folder[0] != '\0')
            SPW_TRY(spw_dir_make(folder, err));
    }
    r->log = r->resumed ? spw_file_append_lines(r->config.run.run_log) : fopen(r->config.run.run_log, "we");
    return r->log != NULL ? SPW_OK : SPW_RAISE_SYS(err, errno, "spillway.run_log %s", r->config.run.run_log);
}

/* What the plan says, and what rates predict of it. */
static json_t *
plan_object(const train_run *r, const spw_prediction *x)
{
    const spw_plan *p = spw_engine_plan(r->engine);
    return json_pack("{s:I, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "process", (json_int_t)p->process_host, "step_s",
                     number(x->timed ? x->step_s : NAN), "nvme_read", (json_int_t)x->traffic.nvme_read, "nvme_write",
                     (json_int_t)x->traffic.nvme_write, "h2d", (json_int_t)x->traffic.h2d, "d2h",
                     (json_int_t)x->traffic.d2h, "gather", (json_int_t)p->gathered.all, "reduce",
                     (json_int_t)p->reduced.all, "trade", (json_int_t)p->traded.all);
}

void
cli_train_log_start(train_run *r, const spw_prediction *predicted)
{
    const spw_config *c = &r->config;
    const spw_layout *l = spw_engine_layout(r->engine);
    const spw_gpu_info *device = spw_gpu_get_info(spw_engine_gpu(r->engine));
    spw_model_config m = r->model->config;
    log_object(
        r, json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:s, s:s, s:I, s:s, s:f, s:f, s:o}", "run", "spillway",
                     "version", SPW_VERSION, "family", spw_family_name(c->model.family), "params",
                     (json_int_t)l->params, "layers", (json_int_t)m.layers, "width", (json_int_t)m.width, "chunk_elems",
                     (json_int_t)c->run.chunk_elems, "state_format", spw_state_name(c->run.state_format), "aio",
                     spw_store_aio_reason(spw_engine_store(r->engine)), "first_step", (json_int_t)(r->at.step + 1),
                     "device", device->description, "peak_flops", device->peak_flops, "model_flops",
                     spw_engine_plan(r->engine)->model_flops, "plan", plan_object(r, predicted)));
}

static json_t *
preferred_object(const spw_pair_means *p)
{
    return json_pack("{s:I, s:f, s:f, s:f}", "pairs", (json_int_t)p->pairs, "chosen", p->chosen, "rejected",
                     p->rejected, "right", p->right);
}

void
cli_train_log_step(train_run *r, uint64_t step, const spw_step_result *s, double eval_loss)
{
    json_t *o;
    if (r->log == NULL)
        return;
    o = json_pack(
        "{s:I, s:o, s:o, s:f, s:f, s:I, s:f, s:f, s:f, s:s, s:f, s:b, s:f, s:o, s:f, s:f, s:o, s:o, s:o, s:I}", "step",
        (json_int_t)step, "loss", number(s->loss), "grad_norm", number(s->grad_norm), "lr", s->lr, "loss_scale",
        s->loss_scale, "tokens", (json_int_t)s->tokens, "step_s", s->step_s, "tokens_per_s",
        (double)s->tokens / s->step_s, "bound_s", s->bound_s, "bound_by", spw_resource_name(s->bound_by), "eta",
        s->bound_s / s->step_s, "skipped", (int)s->skipped, "compute_s", s->compute_s, "stall_s", stall_object(s),
        "other_s", s->other_s, "run_delay_s", s->run_delay_s, "resource_s", bound_object(s), "bytes", bytes_object(s),
        "peak_bytes", peak_object(r), "bytes_written_total", (json_int_t)r->written);
    if (!isnan(eval_loss))
        json_object_set_new(o, "eval_loss", json_real(eval_loss));
    if (s->preferred.pairs > 0)
        json_object_set_new(o, "preferred", preferred_object(&s->preferred));
    if (!isnan(eval_loss) && spw_engine_preferred(r->engine)->pairs > 0)
        json_object_set_new(o, "eval_preferred", preferred_object(spw_engine_preferred(r->engine)));
    if (s->expert_peak > 0)
        json_object_set_new(o, "expert_peak", json_real(s->expert_peak));
    if (spw_engine_plan(r->engine)->ahead)
        json_object_set_new(o, "updates",
                            json_pack("{s:I, s:I, s:I, s:b}", "done", (json_int_t)s->updates, "ahead",
                                      (json_int_t)s->ahead, "undone", (json_int_t)s->undone, "again", (int)s->again));
    log_object(r, o);
}

void
cli_train_tell_monitor(train_run *r, uint64_t step, const spw_step_result *s, double eval_loss)
{
    uint64_t samples = step * r->config.train_batch_size;
    if (s->targets > 0)
        spw_monitor_write(r->monitor, "Train/Samples/train_loss", s->loss, samples);
    spw_monitor_write(r->monitor, "Train/Samples/lr", s->lr, samples);
    if (r->config.fp16)
        spw_monitor_write(r->monitor, "Train/Samples/loss_scale", s->loss_scale, samples);
    if (!isnan(eval_loss))
        spw_monitor_write(r->monitor, "Train/Samples/eval_loss", eval_loss, samples);
    if (s->preferred.pairs > 0) {
        spw_monitor_write(r->monitor, "Train/Samples/right", s->preferred.right, samples);
        spw_monitor_write(r->monitor, "Train/Samples/margin", s->preferred.chosen - s->preferred.rejected, samples);
    }
    if (!isnan(eval_loss) && spw_engine_preferred(r->engine)->pairs > 0)
        spw_monitor_write(r->monitor, "Train/Samples/eval_right", spw_engine_preferred(r->engine)->right, samples);
}

void
cli_train_log_end(train_run *r)
{
    const spw_plan *p = spw_engine_plan(r->engine);
    const spw_step_result *s = &r->sum;
    spw_store_stats stats;
    spw_store_get_stats(spw_engine_store(r->engine), &stats);
    log_object(r, json_pack("{s:s, s:I, s:I, s:f, s:o, s:o, s:o, s:{s:I, s:I}, s:I, s:I, s:I, s:I}", "run", "closed",
                            "steps", (json_int_t)r->steps_done, "tokens", (json_int_t)s->tokens, "step_s", s->step_s,
                            "stall_s", stall_object(s), "bytes", bytes_object(s), "peak_bytes", peak_object(r),
                            "plan_bytes", "host", (json_int_t)p->host_bytes, "device", (json_int_t)p->device_bytes,
                            "rss_peak_bytes", (json_int_t)spw_process_rss_peak_bytes(), "uses", (json_int_t)stats.uses,
                            "hits", (json_int_t)stats.hits, "bytes_written_total", (json_int_t)r->written));
}
